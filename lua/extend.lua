--[[
Renews leases from now. A task told to stop is renewed too, so that its handler can end in order and still ack.
KEYS[2]  processing  ZSET id by visibility deadline us
KEYS[5]  state       HASH id -> flag, token, counts
KEYS[9]  meta        HASH
ARGV[1]  clock override in ms, 0 = the server's
ARGV[2]  lease in ms
ARGV[3]  n, 1 to 500
ARGV[4]  m, how many tokens
ARGV[5]  from here: m times token and how many of the ids are its, n distinct ids in that order
Returns  {renewed, i, code, ...} for the exceptions: -1 lease lost (LEASE_LOST), -2 no lease on record (UNKNOWN),
         -7 renewed, and told to stop (STOP)
]]
--- @include "unpack"
--- @include "now"
--- @include "batch"
--- @include "entry"
local n = tonumber(ARGV[3])
local bad = bad_batch(n, #ARGV, 4 + 2 * tonumber(ARGV[4]) + n)
if bad then return bad end
local deadline = int(now(ARGV[1]) + ARGV[2] * 1000)
local base = 4 + 2 * tonumber(ARGV[4]) -- the ids follow it
local entries = redis.call('HMGET', KEYS[5], unpack(ARGV, base + 1, base + n))
redis.call('ZCARD', KEYS[2])
local z, reply, stale = {}, {}, 0
local group, token, left = 5, nil, 0
for i = 1, n do
  local e, code = entries[i], 1
  if left == 0 then
    token, left = ARGV[group], tonumber(ARGV[group + 1])
    group = group + 2
  end
  left = left - 1
  if not e then
    code = -2
  elseif not held(e, token) then
    code = -1
    stale = stale + 1
  elseif string.byte(e, 1) == 67 then
    code = -7
  end
  if code == 1 or code == -7 then
    z[#z + 1] = deadline
    z[#z + 1] = ARGV[base + i]
  end
  if code ~= 1 then
    reply[#reply + 1] = i
    reply[#reply + 1] = code
  end
end
redis.call('HDEL', KEYS[9], '') -- the opener, see lease
if #z > 0 then redis.call('ZADD', KEYS[2], unpack(z)) end
if stale > 0 then redis.call('HINCRBY', KEYS[9], 'c:stale', stale) end
return { n - #reply / 2, unpack(reply) }
