--[[
Shows a ledger's open tasks, each at its revision: they wait at their due time, under whatever lease an older revision was. A
late or repeated call changes nothing, since Redis keeps the newer revision. What it applies to:
  no entry     no tombstone, or one of this revision or an older one. This one too: what was dropped because it lies beyond
               the horizon comes back unchanged.
  an entry     of an older revision (none counts as 0), or in quarantine at this one
  in pieces    as no entry; the pieces go
A call that makes a record is refused by a full Redis, like enqueue, and the reconciler repeats it; one that only moves what
is there (a retry) is not, so that a full Redis drains.
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
ARGV[3]  k, how many counters
ARGV[4]  from here: k times counter ("e:..." or "f:...") and amount, n distinct ids, n revisions (1 to 2^53), n due times in us,
         n encoded tasks
Returns  {put, i, code, ...} for the exceptions: 2 there at this revision (REPEAT), -8 there or dropped at a newer one (NEWER);
         {-9} no such shard of a ledger (NO_EPOCH)
]]
--- @include "unpack"
--- @include "now"
--- @include "batch"
--- @include "tombs"
--- @include "revs"
--- @include "counters"
local n, k = tonumber(ARGV[2]), tonumber(ARGV[3])
local base = 3 + 2 * k -- the ids follow it
local bad = bad_batch(n, #ARGV, base + 4 * n) or bad_counters(ARGV, 3, k)
if bad then return bad end
local t = now(ARGV[1])
local m = redis.call('HMGET', KEYS[9], 'epoch', 'mode', 'tp', 'tr', 'ret')
if not m[1] or m[2] ~= 'ledger' then return { -9 } end
local revs = redis.call('HMGET', KEYS[12], unpack(ARGV, base + 1, base + n))
local waiting = redis.call('ZMSCORE', KEYS[1], unpack(ARGV, base + 1, base + n))
local running = redis.call('ZMSCORE', KEYS[2], unpack(ARGV, base + 1, base + n))
local died = redis.call('ZMSCORE', KEYS[3], unpack(ARGV, base + 1, base + n))
local g, none = tombs(m[3], m[4], m[5], KEYS[6], KEYS[7], t), {}
local cur = g.cur_counts and redis.call('HMGET', g.cur, unpack(ARGV, base + 1, base + n)) or none
local prev = g.prev_counts and redis.call('HMGET', g.prev, unpack(ARGV, base + 1, base + n)) or none
redis.call('HLEN', KEYS[4])
redis.call('HLEN', KEYS[5])
redis.call('HLEN', KEYS[6])
redis.call('HLEN', KEYS[7])
redis.call('HLEN', KEYS[8])
local ids, z, h, v, reply = {}, {}, {}, {}, {}
local leased, buried, unburied, lost, grows = {}, {}, {}, 0, false
for i = 1, n do
  local id, rev, tomb = ARGV[base + i], tonumber(ARGV[base + n + i]), cur[i] or prev[i]
  local pieces, code, record = revs[i] or waiting[i] or running[i] or died[i], 1, false
  if pieces then record = redis.call('HEXISTS', KEYS[4], id) == 1 end
  if pieces and whole(record, waiting[i], running[i], died[i], not running[i] or redis.call('HEXISTS', KEYS[5], id) == 1) then
    local at = tonumber(revs[i] or '0')
    if at > rev then code = -8 elseif at == rev and not died[i] then code = 2 end
  elseif tomb_rev(tomb) > rev then
    code = -8
  end
  if code == 1 then
    ids[#ids + 1] = id
    z[#z + 1] = ARGV[base + 2 * n + i]
    z[#z + 1] = id
    h[#h + 1] = id
    h[#h + 1] = ARGV[base + 3 * n + i]
    v[#v + 1] = id
    v[#v + 1] = ARGV[base + n + i]
    if running[i] then leased[#leased + 1] = id end
    if died[i] then buried[#buried + 1] = id end
    if tomb then unburied[#unburied + 1] = id end
    if not record then
      grows = true
      if pieces then lost = lost + 1 end
    end
  else
    reply[#reply + 1] = i
    reply[#reply + 1] = code
  end
end
if not grows then redis.call('HDEL', KEYS[9], '') end -- the opener, see lease
if #ids > 0 then
  redis.call('ZADD', KEYS[1], unpack(z))
  local made = redis.call('HSET', KEYS[4], unpack(h))
  redis.call('HSET', KEYS[12], unpack(v))
  if #leased > 0 then redis.call('ZREM', KEYS[2], unpack(leased)) end
  if #buried > 0 then redis.call('ZREM', KEYS[3], unpack(buried)) end
  redis.call('HDEL', KEYS[5], unpack(ids))
  redis.call('HDEL', KEYS[8], unpack(ids))
  if #unburied > 0 then
    redis.call('HDEL', KEYS[6], unpack(unburied))
    redis.call('HDEL', KEYS[7], unpack(unburied))
  end
  if made > 0 then redis.call('HINCRBY', KEYS[9], 'e:shown', made) end
  if lost > 0 then redis.call('HINCRBY', KEYS[9], 'c:missing', lost) end
end
add_counters(KEYS[9], ARGV, 3, k)
return { #ids, unpack(reply) }
