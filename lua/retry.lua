--[[
Gives failed tasks back to pending for another attempt, if the caller still holds their leases.
KEYS[1]  pending     ZSET id by due us
KEYS[2]  processing  ZSET id by visibility deadline us
KEYS[4]  tasks       HASH id -> encoded task
KEYS[5]  state       HASH id -> flag, token, counts
KEYS[6]  done:0      HASH tombstones
KEYS[7]  done:1      HASH tombstones
KEYS[8]  errors      HASH id -> reason and last error
KEYS[9]  meta        HASH
ARGV[1]  clock override in ms, 0 = the server's
ARGV[2]  n, 1 to 500
ARGV[3]  from here: n distinct ids, n tokens, n delays in ms, n errors ("reason\ntext"), n encoded tasks (empty = unchanged)
Returns  {retried, i, code, ...} for the exceptions: 2 retried by an earlier send (REPEAT), 4 was cancelled: ended so
         (CANCELLED), -1 lease lost (LEASE_LOST), -2 no such task (UNKNOWN)
]]
--- @include "unpack"
--- @include "now"
--- @include "dues"
--- @include "batch"
--- @include "entry"
--- @include "tombs"
--- @include "end_cancelled"
--- @include "settle"
local n = tonumber(ARGV[2])
local bad = bad_batch(n, #ARGV, 2 + 5 * n)
if bad then return bad end
local t = now(ARGV[1])
local entries = redis.call('HMGET', KEYS[5], unpack(ARGV, 3, n + 2))
local m = redis.call('HMGET', KEYS[9], 'tp', 'tr', 'ret')
local g = tombs(m[1], m[2], m[3], KEYS[6], KEYS[7], t)
redis.call('ZCARD', KEYS[1])
redis.call('ZCARD', KEYS[2])
redis.call('HLEN', KEYS[4])
redis.call('HLEN', KEYS[8])
redis.call('HLEN', g.cur)
redis.call('HLEN', g.prev)
local ids, z, h, errs, blobs, stopped, reply, stale, reasons = {}, {}, {}, {}, {}, {}, {}, 0, {}
for i = 1, n do
  local id, token, e = ARGV[2 + i], ARGV[n + 2 + i], entries[i]
  local code = verdict(e, token, 82, g, id)
  if code == 1 then
    local d, f, l, start = counts(e)
    ids[#ids + 1] = id
    z[#z + 1] = due_score(t, ARGV[2 * n + 2 + i], i)
    z[#z + 1] = id
    h[#h + 1] = id
    h[#h + 1] = 'R' .. token .. d .. ':' .. (f + 1) .. ':' .. l .. ':' .. start
    errs[#errs + 1] = id
    errs[#errs + 1] = ARGV[3 * n + 2 + i]
    if ARGV[4 * n + 2 + i] ~= '' then
      blobs[#blobs + 1] = id
      blobs[#blobs + 1] = ARGV[4 * n + 2 + i]
    end
    local reason = string.match(ARGV[3 * n + 2 + i], '^[^\n]*')
    reasons[reason] = (reasons[reason] or 0) + 1
  else
    if code == 4 then stopped[#stopped + 1] = id end
    if code == -1 then stale = stale + 1 end
    reply[#reply + 1] = i
    reply[#reply + 1] = code == 5 and 4 or code
  end
end
redis.call('HDEL', KEYS[9], '') -- the opener, see lease
local done = #stopped > 0 and open_tombs(g, KEYS[9], t)
if #ids > 0 then
  redis.call('ZADD', KEYS[1], unpack(z))
  redis.call('HSET', KEYS[5], unpack(h))
  redis.call('HSET', KEYS[8], unpack(errs))
  if #blobs > 0 then redis.call('HSET', KEYS[4], unpack(blobs)) end
  redis.call('ZREM', KEYS[2], unpack(ids))
  redis.call('HINCRBY', KEYS[9], 'c:retried', #ids)
  for reason, k in pairs(reasons) do redis.call('HINCRBY', KEYS[9], 'f:' .. reason, k) end
end
if #stopped > 0 then end_cancelled(stopped, done, KEYS[2], KEYS[4], KEYS[5], KEYS[8], KEYS[9]) end
if stale > 0 then redis.call('HINCRBY', KEYS[9], 'c:stale', stale) end
return { #ids, unpack(reply) }
