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
         meta as field, value, ..., revs, expired, start of the oldest lease in ms or -1, last call of a consumer in us or -1};
         waiting counts what is not yet due, due includes expired leases; the oldest lease is that of the 200 that end next
         code 1, -9 no such shard (NO_EPOCH)
]]
--- @include "unpack"
--- @include "now"
--- @include "entry"
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
-- Tasks leased together have one text, so few are taken apart.
local start, before = -1, nil
local live = redis.call('ZRANGEBYSCORE', KEYS[2], '(' .. at, '(9007199254740991', 'LIMIT', 0, 200)
local entries = #live > 0 and redis.call('HMGET', KEYS[5], unpack(live)) or {}
for i = 1, #live do
  local e = entries[i]
  if e and e ~= before then
    local _, _, _, began = counts(e)
    began = tonumber(began or '-1')
    if began >= 0 and (start < 0 or began < start) then start = began end
    before = e
  end
end
local called = -1
local last = redis.call('ZRANGE', KEYS[11], -2, -1, 'WITHSCORES') -- the last is the sentinel
for i = 1, #last, 2 do
  if last[i] ~= '' then called = tonumber(last[i + 1]) end
end
return {
  1, t,
  redis.call('ZCARD', KEYS[1]) - 1 - due, due + expired, redis.call('ZCARD', KEYS[2]) - 1 - expired,
  redis.call('ZCARD', KEYS[3]) - 1, oldest, redis.call('ZCARD', KEYS[11]) - 1,
  redis.call('HLEN', KEYS[4]) - 1, redis.call('HLEN', KEYS[5]) - 1, redis.call('HLEN', KEYS[8]) - 1,
  redis.call('HLEN', KEYS[6]) + redis.call('HLEN', KEYS[7]) - 2, meta,
  redis.call('HLEN', KEYS[12]) - 1, expired, start, called,
}
