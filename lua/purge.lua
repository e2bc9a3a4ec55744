--[[
Deletes dead letters for good. Leaves no tombstone: the id is free at once.
KEYS[3]  dead        ZSET id by time of death us
KEYS[4]  tasks       HASH id -> encoded task
KEYS[5]  state       HASH id -> flag, token, counts
KEYS[8]  errors      HASH id -> reason and last error
KEYS[9]  meta        HASH
KEYS[12] revs        HASH id -> revision in the ledger
ARGV[1]  n, 1 to 500
ARGV[2]  from here: n distinct ids
Returns  {purged, i, code, ...} for the exceptions: -2 no such dead letter (UNKNOWN)
]]
--- @include "unpack"
--- @include "batch"
local n = tonumber(ARGV[1])
local bad = bad_batch(n, #ARGV, 1 + n)
if bad then return bad end
local died = redis.call('ZMSCORE', KEYS[3], unpack(ARGV, 2, n + 1))
redis.call('HLEN', KEYS[4])
redis.call('HLEN', KEYS[5])
redis.call('HLEN', KEYS[8])
redis.call('HLEN', KEYS[9])
redis.call('HLEN', KEYS[12])
local ids, reply = {}, {}
for i = 1, n do
  if died[i] then
    ids[#ids + 1] = ARGV[1 + i]
  else
    reply[#reply + 1] = i
    reply[#reply + 1] = -2
  end
end
if #ids > 0 then
  redis.call('HDEL', KEYS[4], unpack(ids))
  redis.call('HDEL', KEYS[5], unpack(ids))
  redis.call('HDEL', KEYS[8], unpack(ids))
  redis.call('HDEL', KEYS[12], unpack(ids))
  redis.call('ZREM', KEYS[3], unpack(ids))
  redis.call('HINCRBY', KEYS[9], 'c:purged', #ids)
end
return { #ids, unpack(reply) }
