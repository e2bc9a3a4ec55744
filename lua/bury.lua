--[[
Moves tasks to the dead letters with their reason, if the caller still holds their leases. Beyond the cap the oldest dead
letters go, index and record in the same call, at most twice as many as came.
KEYS[2]  processing  ZSET id by visibility deadline us
KEYS[3]  dead        ZSET id by time of death us
KEYS[4]  tasks       HASH id -> encoded task
KEYS[5]  state       HASH id -> flag, token, counts
KEYS[6]  done:0      HASH tombstones
KEYS[7]  done:1      HASH tombstones
KEYS[8]  errors      HASH id -> reason and last error
KEYS[9]  meta        HASH
KEYS[12] revs        HASH id -> revision in the ledger
ARGV[1]  clock override in ms, 0 = the server's
ARGV[2]  n, 1 to 500
ARGV[3]  most dead letters to keep
ARGV[4]  1 = the attempt counts as failed, 0 = not (the task was not run)
ARGV[5]  from here: n distinct ids, n tokens, n errors ("reason\ntext")
Returns  {buried, i, code, ...} for the exceptions: 2 buried by an earlier send (REPEAT), 4 was cancelled: ended so
         (CANCELLED), -1 lease lost (LEASE_LOST), -2 no such task (UNKNOWN)
]]
--- @include "unpack"
--- @include "now"
--- @include "batch"
--- @include "entry"
--- @include "tombs"
--- @include "end_cancelled"
--- @include "settle"
--- @include "trim"
local n = tonumber(ARGV[2])
local bad = bad_batch(n, #ARGV, 4 + 3 * n)
if bad then return bad end
local t = now(ARGV[1])
local entries = redis.call('HMGET', KEYS[5], unpack(ARGV, 5, n + 4))
local m = redis.call('HMGET', KEYS[9], 'tp', 'tr', 'ret')
local g = tombs(m[1], m[2], m[3], KEYS[6], KEYS[7], t)
redis.call('ZCARD', KEYS[2])
redis.call('ZCARD', KEYS[3])
redis.call('ZRANGE', KEYS[3], 0, 0)
redis.call('HLEN', KEYS[4])
redis.call('HLEN', KEYS[8])
redis.call('HLEN', g.cur)
redis.call('HLEN', g.prev)
redis.call('HLEN', KEYS[12])
local ids, z, h, errs, stopped, reply, stale, reasons = {}, {}, {}, {}, {}, {}, 0, {}
for i = 1, n do
  local id, token, e = ARGV[4 + i], ARGV[n + 4 + i], entries[i]
  local code = verdict(e, token, 66, g, id)
  if code == 1 then
    local d, f, l, start = counts(e)
    ids[#ids + 1] = id
    z[#z + 1] = int(t + i)
    z[#z + 1] = id
    h[#h + 1] = id
    h[#h + 1] = 'B' .. token .. d .. ':' .. (f + tonumber(ARGV[4])) .. ':' .. l .. ':' .. start
    errs[#errs + 1] = id
    errs[#errs + 1] = ARGV[2 * n + 4 + i]
    local reason = string.match(ARGV[2 * n + 4 + i], '^[^\n]*')
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
  redis.call('ZADD', KEYS[3], unpack(z))
  redis.call('HSET', KEYS[5], unpack(h))
  redis.call('HSET', KEYS[8], unpack(errs))
  redis.call('ZREM', KEYS[2], unpack(ids))
  redis.call('HINCRBY', KEYS[9], 'c:buried', #ids)
  for reason, k in pairs(reasons) do redis.call('HINCRBY', KEYS[9], 'f:' .. reason, k) end
  trim(KEYS[3], KEYS[4], KEYS[5], KEYS[8], KEYS[12], KEYS[9], tonumber(ARGV[3]), 2 * n)
end
if #stopped > 0 then end_cancelled(stopped, done, KEYS[2], KEYS[4], KEYS[5], KEYS[8], KEYS[9]) end
if stale > 0 then redis.call('HINCRBY', KEYS[9], 'c:stale', stale) end
return { #ids, unpack(reply) }
