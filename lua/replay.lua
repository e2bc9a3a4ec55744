--[[
Puts dead letters back to pending, due now, with their counts at zero.
KEYS[1]  pending     ZSET id by due us
KEYS[3]  dead        ZSET id by time of death us
KEYS[5]  state       HASH id -> flag, token, counts
KEYS[8]  errors      HASH id -> reason and last error
KEYS[9]  meta        HASH
ARGV[1]  clock override in ms, 0 = the server's
ARGV[2]  n, 1 to 500
ARGV[3]  from here: n distinct ids
Returns  {replayed, i, code, ...} for the exceptions: -2 no such dead letter (UNKNOWN); {-15} kept by a ledger (MODE)
]]
--- @include "unpack"
--- @include "now"
--- @include "batch"
local n = tonumber(ARGV[2])
local bad = bad_batch(n, #ARGV, 2 + n)
if bad then return bad end
local t = now(ARGV[1])
if redis.call('HGET', KEYS[9], 'mode') then return { -15 } end
local died = redis.call('ZMSCORE', KEYS[3], unpack(ARGV, 3, n + 2))
redis.call('ZCARD', KEYS[1])
redis.call('HLEN', KEYS[5])
redis.call('HLEN', KEYS[8])
local ids, z, reply = {}, {}, {}
for i = 1, n do
  if died[i] then
    ids[#ids + 1] = ARGV[2 + i]
    z[#z + 1] = int(t + i)
    z[#z + 1] = ARGV[2 + i]
  else
    reply[#reply + 1] = i
    reply[#reply + 1] = -2
  end
end
redis.call('HDEL', KEYS[9], '') -- the opener, see lease
if #ids > 0 then
  redis.call('ZADD', KEYS[1], unpack(z))
  redis.call('ZREM', KEYS[3], unpack(ids))
  redis.call('HDEL', KEYS[5], unpack(ids))
  redis.call('HDEL', KEYS[8], unpack(ids))
  redis.call('HINCRBY', KEYS[9], 'c:replayed', #ids)
end
return { #ids, unpack(reply) }
