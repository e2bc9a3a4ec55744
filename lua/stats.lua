--[[
Describes a shard in O(log n): sizes, heads, lifetime counters. Reads only.
KEYS[1]  pending     ZSET id by due us
KEYS[2]  processing  ZSET id by visibility deadline us
KEYS[3]  dead        ZSET id by time of death us
KEYS[4]  tasks       HASH id -> encoded task
KEYS[5]  state       HASH id -> flag, token, counts
KEYS[6]  done:0      HASH tombstones
KEYS[7]  done:1      HASH tombstones
KEYS[8]  errors      HASH id -> reason and last error
KEYS[9]  meta        HASH
KEYS[11] consumers   ZSET consumer by last call
KEYS[12] revs        HASH id -> revision in the ledger
ARGV[1]  clock override in ms, 0 = the server's
Returns  {code, now us, waiting, due, processing, dead, oldest due us or -1, consumers, tasks, states, errors, tombstones,
         meta as field, value, ..., revs, expired}; waiting counts what is not yet due, due includes expired leases
         code 1, -9 no such shard (NO_EPOCH)
]]
--- @include "now"
local t = now(ARGV[1])
local meta = redis.call('HGETALL', KEYS[9])
if redis.call('HEXISTS', KEYS[9], 'epoch') == 0 then return { -9 } end
local at = int(t)
local due = redis.call('ZCOUNT', KEYS[1], '-inf', at)
local expired = redis.call('ZCOUNT', KEYS[2], '-inf', at)
local oldest = -1
for k = 1, 2 do
  local head = redis.call('ZRANGE', KEYS[k], 0, 0, 'WITHSCORES')
  local score = tonumber(head[2] or '9007199254740991')
  if score <= t and (oldest < 0 or score < oldest) then oldest = score end
end
return {
  1, t,
  redis.call('ZCARD', KEYS[1]) - 1 - due, due + expired, redis.call('ZCARD', KEYS[2]) - 1 - expired,
  redis.call('ZCARD', KEYS[3]) - 1, oldest, redis.call('ZCARD', KEYS[11]) - 1,
  redis.call('HLEN', KEYS[4]) - 1, redis.call('HLEN', KEYS[5]) - 1, redis.call('HLEN', KEYS[8]) - 1,
  redis.call('HLEN', KEYS[6]) + redis.call('HLEN', KEYS[7]) - 2, meta,
  redis.call('HLEN', KEYS[12]) - 1, expired,
}
