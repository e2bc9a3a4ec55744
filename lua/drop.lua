--[[
Takes tasks out that a ledger has ended, or that are due beyond its horizon, each at its revision, whatever their lease. Leaves the
revision as tombstone, so that a late put of an older one does not bring them back. Applies where there is no entry, or one
of an older revision or without: at equal revisions the open side wins, since only the horizon drops an open task. What is
in pieces counts as no entry; the pieces go.
KEYS[1]  pending     ZSET id by due us
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
ARGV[3]  1 = they succeeded: note how long they were leased, 0 = not
ARGV[4]  k, how many counters
ARGV[5]  from here: k times counter ("e:..." or "f:...") and amount, n distinct ids, n revisions (1 to 2^53)
Returns  {dropped, i, code, ...} for the exceptions: -8 there at this revision or a newer one (NEWER);
         {-9} no such shard of a ledger (NO_EPOCH)
]]
--- @include "unpack"
--- @include "now"
--- @include "batch"
--- @include "entry"
--- @include "tombs"
--- @include "buckets"
--- @include "revs"
--- @include "counters"
local n, k = tonumber(ARGV[2]), tonumber(ARGV[4])
local base = 4 + 2 * k -- the ids follow it
local bad = bad_batch(n, #ARGV, base + 2 * n) or bad_counters(ARGV, 4, k)
if bad then return bad end
local t = now(ARGV[1])
local m = redis.call('HMGET', KEYS[9], 'epoch', 'mode', 'tp', 'tr', 'ret')
if not m[1] or m[2] ~= 'ledger' then return { -9 } end
local revs = redis.call('HMGET', KEYS[12], unpack(ARGV, base + 1, base + n))
local waiting = redis.call('ZMSCORE', KEYS[1], unpack(ARGV, base + 1, base + n))
local running = redis.call('ZMSCORE', KEYS[2], unpack(ARGV, base + 1, base + n))
local died = redis.call('ZMSCORE', KEYS[3], unpack(ARGV, base + 1, base + n))
local entries = redis.call('HMGET', KEYS[5], unpack(ARGV, base + 1, base + n))
local g, none = tombs(m[3], m[4], m[5], KEYS[6], KEYS[7], t), {}
local cur = g.cur_counts and redis.call('HMGET', g.cur, unpack(ARGV, base + 1, base + n)) or none
local prev = g.prev_counts and redis.call('HMGET', g.prev, unpack(ARGV, base + 1, base + n)) or none
redis.call('HLEN', KEYS[4])
redis.call('HLEN', KEYS[6])
redis.call('HLEN', KEYS[7])
redis.call('HLEN', KEYS[8])
local ids, there, graves, reply = {}, {}, {}, {}
local from_pending, from_processing, from_dead, hits, timed, sum = {}, {}, {}, {}, 0, 0
for i = 1, n do
  local id, rev = ARGV[base + i], tonumber(ARGV[base + n + i])
  if revs[i] and tonumber(revs[i]) >= rev and
    whole(redis.call('HEXISTS', KEYS[4], id) == 1, waiting[i], running[i], died[i], entries[i]) then
    reply[#reply + 1] = i
    reply[#reply + 1] = -8
  else
    ids[#ids + 1] = id
    graves[#graves + 1] = id
    graves[#graves + 1] = 'rev:' .. int(math.max(rev, tomb_rev(cur[i] or prev[i])))
    if revs[i] or waiting[i] or running[i] or died[i] then there[#there + 1] = id end
    if waiting[i] then from_pending[#from_pending + 1] = id end
    if died[i] then from_dead[#from_dead + 1] = id end
    if running[i] then
      from_processing[#from_processing + 1] = id
      if ARGV[3] == '1' and entries[i] then
        local _, _, _, start = counts(entries[i])
        if start then
          local ms = math.max(0, t / 1000 - start)
          local b = bucket(ms)
          hits[b] = (hits[b] or 0) + 1
          timed, sum = timed + 1, sum + ms
        end
      end
    end
  end
end
redis.call('HDEL', KEYS[9], '') -- the opener, see lease
if #ids > 0 then
  redis.call('HSET', open_tombs(g, KEYS[9], t), unpack(graves))
  local lost = #there
  if #there > 0 then
    lost = lost - redis.call('HDEL', KEYS[4], unpack(there))
    redis.call('HDEL', KEYS[12], unpack(there))
  end
  local gone = #there - lost + redis.call('HDEL', KEYS[4], unpack(ids)) -- these had a record and nothing else
  if #from_pending > 0 then redis.call('ZREM', KEYS[1], unpack(from_pending)) end
  if #from_processing > 0 then redis.call('ZREM', KEYS[2], unpack(from_processing)) end
  if #from_dead > 0 then redis.call('ZREM', KEYS[3], unpack(from_dead)) end
  redis.call('HDEL', KEYS[5], unpack(ids))
  redis.call('HDEL', KEYS[8], unpack(ids))
  if gone > 0 then redis.call('HINCRBY', KEYS[9], 'e:dropped', gone) end
  if lost > 0 then redis.call('HINCRBY', KEYS[9], 'c:missing', lost) end
  if timed > 0 then
    redis.call('HINCRBY', KEYS[9], 'e:timed', timed)
    raise(KEYS[9], 'd:', hits, sum)
  end
end
if ARGV[3] == '1' and #ids > 0 then redis.call('HSET', KEYS[9], 'at:ok', int(t)) end
add_counters(KEYS[9], ARGV, 4, k)
return { #ids, unpack(reply) }
