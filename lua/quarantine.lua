--[[
Moves tasks that the ledger does not know to the dead letters, if they are still at the revision at which they were seen. A
put of the revision lifts them again, in case the ledger comes to know them after all. One without gets 0, so that nobody
takes it for a task that is still to be adopted. Beyond the cap the oldest dead letters go, as in bury.
KEYS[1]  pending     ZSET id by due us
KEYS[2]  processing  ZSET id by visibility deadline us
KEYS[3]  dead        ZSET id by time of death us
KEYS[4]  tasks       HASH id -> encoded task
KEYS[5]  state       HASH id -> flag, token, counts
KEYS[8]  errors      HASH id -> reason and last error
KEYS[9]  meta        HASH
KEYS[12] revs        HASH id -> revision in the ledger
ARGV[1]  clock override in ms, 0 = the server's
ARGV[2]  n, 1 to 500
ARGV[3]  most dead letters to keep
ARGV[4]  why: "reason\ntext"
ARGV[5]  from here: n distinct ids, n revisions as seen (0 = none), n tokens (empty = whatever the lease)
Returns  {quarantined, i, code, ...} for the exceptions: 2 there already (REPEAT), -1 not leased with this token (LEASE_LOST),
         -2 no such task (UNKNOWN), -8 at another revision (CHANGED), -14 it had no record: removed (BROKEN);
         {-9} no such shard of a ledger (NO_EPOCH)
]]
--- @include "unpack"
--- @include "now"
--- @include "batch"
--- @include "entry"
--- @include "trim"
local n = tonumber(ARGV[2])
local bad = bad_batch(n, #ARGV, 4 + 3 * n)
if bad then return bad end
local t = now(ARGV[1])
local m = redis.call('HMGET', KEYS[9], 'epoch', 'mode')
if not m[1] or m[2] ~= 'ledger' then return { -9 } end
local revs = redis.call('HMGET', KEYS[12], unpack(ARGV, 5, n + 4))
local waiting = redis.call('ZMSCORE', KEYS[1], unpack(ARGV, 5, n + 4))
local running = redis.call('ZMSCORE', KEYS[2], unpack(ARGV, 5, n + 4))
local died = redis.call('ZMSCORE', KEYS[3], unpack(ARGV, 5, n + 4))
local entries = redis.call('HMGET', KEYS[5], unpack(ARGV, 5, n + 4))
redis.call('HLEN', KEYS[8])
redis.call('ZCARD', KEYS[3])
redis.call('ZRANGE', KEYS[3], 0, 0)
local ids, z, h, v, errs, from_pending, from_processing, lost, reply = {}, {}, {}, {}, {}, {}, {}, {}, {}
for i = 1, n do
  local id, seen, token, e = ARGV[4 + i], ARGV[n + 4 + i], ARGV[2 * n + 4 + i], entries[i]
  local pieces = revs[i] or waiting[i] or running[i] or died[i]
  local record, code = redis.call('HEXISTS', KEYS[4], id) == 1, 1
  if not pieces and not record then
    code = -2
  elseif (revs[i] or '0') ~= seen then
    code = -8
  elseif record and died[i] and not waiting[i] and not running[i] then
    code = 2
  elseif token ~= '' and not (running[i] and held(e, token)) then
    code = -1
  elseif not record then
    code = -14
    lost[#lost + 1] = id
  else
    ids[#ids + 1] = id
    z[#z + 1] = int(t + i)
    z[#z + 1] = id
    errs[#errs + 1] = id
    errs[#errs + 1] = ARGV[4]
    if e then
      h[#h + 1] = id
      h[#h + 1] = 'B' .. string.sub(e, 2)
    end
    if not revs[i] then
      v[#v + 1] = id
      v[#v + 1] = '0'
    end
    if waiting[i] then from_pending[#from_pending + 1] = id end
    if running[i] then from_processing[#from_processing + 1] = id end
  end
  if code ~= 1 then
    reply[#reply + 1] = i
    reply[#reply + 1] = code
  end
end
redis.call('HDEL', KEYS[9], '') -- the opener, see lease
if #ids > 0 then
  redis.call('ZADD', KEYS[3], unpack(z))
  if #h > 0 then redis.call('HSET', KEYS[5], unpack(h)) end
  redis.call('HSET', KEYS[8], unpack(errs))
  if #v > 0 then redis.call('HSET', KEYS[12], unpack(v)) end
  if #from_pending > 0 then redis.call('ZREM', KEYS[1], unpack(from_pending)) end
  if #from_processing > 0 then redis.call('ZREM', KEYS[2], unpack(from_processing)) end
  redis.call('HINCRBY', KEYS[9], 'c:quarantined', #ids)
  trim(KEYS[3], KEYS[4], KEYS[5], KEYS[8], KEYS[12], KEYS[9], tonumber(ARGV[3]), 2 * n)
end
if #lost > 0 then
  redis.call('ZREM', KEYS[1], unpack(lost))
  redis.call('ZREM', KEYS[2], unpack(lost))
  redis.call('ZREM', KEYS[3], unpack(lost))
  redis.call('HDEL', KEYS[5], unpack(lost))
  redis.call('HDEL', KEYS[8], unpack(lost))
  redis.call('HDEL', KEYS[12], unpack(lost))
  redis.call('HINCRBY', KEYS[9], 'c:missing', #lost)
end
return { #ids, unpack(reply) }
