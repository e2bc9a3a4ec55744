--[[
Puts right what is in pieces. What cannot run is removed with every trace: the ledger has it, if anyone. What has its record is
made whole instead: leased but without state it waits again, due now; in several places it stays where its lease is, or
else it waits. A dead letter without revision, from before the queue had a ledger, gets 0 as in quarantine.
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
ARGV[3]  from here: n distinct ids
Returns  {mended, i, code, ...} for the exceptions: 2 whole (REPEAT), -17 whole, but of no revision (UNBOOKED), -2 no trace of it
         (UNKNOWN); {-9} no such shard of a ledger (NO_EPOCH)
]]
--- @include "unpack"
--- @include "now"
--- @include "batch"
--- @include "revs"
local n = tonumber(ARGV[2])
local bad = bad_batch(n, #ARGV, 2 + n)
if bad then return bad end
local t = now(ARGV[1])
local m = redis.call('HMGET', KEYS[9], 'epoch', 'mode')
if not m[1] or m[2] ~= 'ledger' then return { -9 } end
local revs = redis.call('HMGET', KEYS[12], unpack(ARGV, 3, n + 2))
local waiting = redis.call('ZMSCORE', KEYS[1], unpack(ARGV, 3, n + 2))
local running = redis.call('ZMSCORE', KEYS[2], unpack(ARGV, 3, n + 2))
local died = redis.call('ZMSCORE', KEYS[3], unpack(ARGV, 3, n + 2))
local entries = redis.call('HMGET', KEYS[5], unpack(ARGV, 3, n + 2))
redis.call('HLEN', KEYS[8])
local mended, gone, lost, z, marks, v, reply = 0, {}, 0, {}, {}, {}, {}
local unwait, unlease, undead = {}, {}, {}
for i = 1, n do
  local id, e, code = ARGV[2 + i], entries[i], 1
  local record = redis.call('HEXISTS', KEYS[4], id) == 1
  local placed = waiting[i] or running[i] or died[i]
  if whole(record, waiting[i], running[i], died[i], e) then
    code = (revs[i] or died[i]) and 2 or -17
    if died[i] and not revs[i] then
      v[#v + 1] = id
      v[#v + 1] = '0'
    end
  elseif not record or not placed then
    if revs[i] or placed then
      if not record then lost = lost + 1 end
    elseif not record and not e and redis.call('HEXISTS', KEYS[8], id) == 0 then
      code = -2
    end
    if code == 1 then gone[#gone + 1] = id end
  elseif running[i] and e and string.match(e, '^[LC]') then
    if waiting[i] then unwait[#unwait + 1] = id end
    if died[i] then undead[#undead + 1] = id end
  else
    z[#z + 1] = waiting[i] or int(t + i)
    z[#z + 1] = id
    if running[i] then unlease[#unlease + 1] = id end
    if died[i] then undead[#undead + 1] = id end
    if e and not string.match(e, '^[ERX]') then
      marks[#marks + 1] = id
      marks[#marks + 1] = 'X' .. string.sub(e, 2)
    end
  end
  if code == 1 then
    mended = mended + 1
  else
    reply[#reply + 1] = i
    reply[#reply + 1] = code
  end
end
redis.call('HDEL', KEYS[9], '') -- the opener, see lease
if #z > 0 then redis.call('ZADD', KEYS[1], unpack(z)) end
if #v > 0 then redis.call('HSET', KEYS[12], unpack(v)) end
if #marks > 0 then redis.call('HSET', KEYS[5], unpack(marks)) end
if #unwait > 0 then redis.call('ZREM', KEYS[1], unpack(unwait)) end
if #unlease > 0 then redis.call('ZREM', KEYS[2], unpack(unlease)) end
if #undead > 0 then redis.call('ZREM', KEYS[3], unpack(undead)) end
if #gone > 0 then
  local records = redis.call('HDEL', KEYS[4], unpack(gone))
  redis.call('ZREM', KEYS[1], unpack(gone))
  redis.call('ZREM', KEYS[2], unpack(gone))
  redis.call('ZREM', KEYS[3], unpack(gone))
  redis.call('HDEL', KEYS[5], unpack(gone))
  redis.call('HDEL', KEYS[8], unpack(gone))
  redis.call('HDEL', KEYS[12], unpack(gone))
  if records > 0 then redis.call('HINCRBY', KEYS[9], 'e:dropped', records) end
  if lost > 0 then redis.call('HINCRBY', KEYS[9], 'c:missing', lost) end
end
return { mended, unpack(reply) }
