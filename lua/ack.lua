--[[
Ends tasks as succeeded if the caller still holds their leases; a lease that ran out but was not yet taken back counts as
held. Leaves the token as tombstone, which tells "done already by you" from "lease lost".
KEYS[2]  processing  ZSET id by visibility deadline us
KEYS[4]  tasks       HASH id -> encoded task
KEYS[5]  state       HASH id -> flag, token, counts
KEYS[6]  done:0      HASH tombstones
KEYS[7]  done:1      HASH tombstones
KEYS[8]  errors      HASH id -> reason and last error
KEYS[9]  meta        HASH
ARGV[1]  clock override in ms, 0 = the server's
ARGV[2]  n, 1 to 500
ARGV[3]  m, how many tokens
ARGV[4]  from here: m times token and how many of the ids are its, n distinct ids in that order
Returns  {acked, i, code, ...} for the exceptions: 2 acked by an earlier send (REPEAT), -1 lease lost (LEASE_LOST),
         -2 no such task (UNKNOWN)
]]
--- @include "unpack"
--- @include "now"
--- @include "batch"
--- @include "entry"
--- @include "tombs"
--- @include "buckets"
local n = tonumber(ARGV[2])
local bad = bad_batch(n, #ARGV, 3 + 2 * tonumber(ARGV[3]) + n)
if bad then return bad end
local t = now(ARGV[1])
local base = 3 + 2 * tonumber(ARGV[3]) -- the ids follow it
local entries = redis.call('HMGET', KEYS[5], unpack(ARGV, base + 1, base + n))
local m = redis.call('HMGET', KEYS[9], 'tp', 'tr', 'ret')
local g = tombs(m[1], m[2], m[3], KEYS[6], KEYS[7], t)
redis.call('ZCARD', KEYS[2])
redis.call('HLEN', KEYS[4])
local ids, graves, failed, reply, k, stale, hits, sum = {}, {}, {}, {}, 0, 0, {}, 0
local group, token, left = 4, nil, 0
-- The entries of one lease's first deliveries are one text: judged once, counted as a run.
local seen, seen_ms, seen_failed, run = nil, 0, false, 0
local function count_run()
  if run == 0 then return end
  local b = bucket(seen_ms)
  hits[b] = (hits[b] or 0) + run
  sum = sum + run * seen_ms
  run = 0
end
for i = 1, n do
  local id, e = ARGV[base + i], entries[i]
  if left == 0 then
    count_run()
    token, left, seen = ARGV[group], tonumber(ARGV[group + 1]), nil
    group = group + 2
  end
  left = left - 1
  if e and e ~= seen and held(e, token) then
    count_run()
    local _, f, _, start = counts(e)
    seen, seen_ms, seen_failed = e, math.max(0, t / 1000 - start), f > 0
  end
  if e and e == seen then
    k, run = k + 1, run + 1
    ids[k] = id
    graves[2 * k - 1] = id
    graves[2 * k] = token
    if seen_failed then failed[#failed + 1] = id end
  else
    local tomb, code = tomb_of(g, id), -2
    if tomb == token then
      code = 2
    elseif e or tomb then
      code = -1
      stale = stale + 1
    end
    reply[#reply + 1] = i
    reply[#reply + 1] = code
  end
end
count_run()
if #failed > 0 then redis.call('HLEN', KEYS[8]) end
redis.call('HDEL', KEYS[9], '') -- the opener, see lease
if k > 0 then
  redis.call('HSET', open_tombs(g, KEYS[9], t), unpack(graves))
  redis.call('HDEL', KEYS[4], unpack(ids))
  redis.call('ZREM', KEYS[2], unpack(ids))
  redis.call('HDEL', KEYS[5], unpack(ids))
  if #failed > 0 then redis.call('HDEL', KEYS[8], unpack(failed)) end
  raise(KEYS[9], 'd:', hits, sum)
  redis.call('HSET', KEYS[9], 'at:ok', int(t))
end
if stale > 0 then redis.call('HINCRBY', KEYS[9], 'c:stale', stale) end
return { k, unpack(reply) }
