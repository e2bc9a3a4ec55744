--[[
Moves waiting tasks to another due time, atomically; a task that is not waiting stays as it is.
KEYS[1]  pending     ZSET id by due us
KEYS[2]  processing  ZSET id by visibility deadline us
KEYS[3]  dead        ZSET id by time of death us
KEYS[6]  done:0      HASH tombstones
KEYS[7]  done:1      HASH tombstones
KEYS[9]  meta        HASH
ARGV[1]  clock override in ms, 0 = the server's
ARGV[2]  n, 1 to 500
ARGV[3]  from here: n distinct ids, n due times ("1500" = delay in ms, "@1790000000000" = instant in ms)
Returns  {moved, i, code, ...} for the exceptions: -4 processing (PROCESSING), -5 dead (DEAD), -6 done (DONE),
         -2 no such task (UNKNOWN); {-15} kept by a ledger (MODE)
]]
--- @include "unpack"
--- @include "now"
--- @include "dues"
--- @include "batch"
--- @include "tombs"
local n = tonumber(ARGV[2])
local bad = bad_batch(n, #ARGV, 2 + 2 * n)
if bad then return bad end
local t = now(ARGV[1])
local m = redis.call('HMGET', KEYS[9], 'tp', 'tr', 'ret', 'mode')
if m[4] then return { -15 } end
local waiting = redis.call('ZMSCORE', KEYS[1], unpack(ARGV, 3, n + 2))
local g = tombs(m[1], m[2], m[3], KEYS[6], KEYS[7], t)
local z, reply = {}, {}
for i = 1, n do
  local id, due = ARGV[2 + i], ARGV[n + 2 + i]
  if waiting[i] then
    z[#z + 1] = due_score(t, due, i)
    z[#z + 1] = id
  else
    local code = -2
    if redis.call('ZSCORE', KEYS[2], id) then
      code = -4
    elseif redis.call('ZSCORE', KEYS[3], id) then
      code = -5
    elseif tomb_of(g, id) then
      code = -6
    end
    reply[#reply + 1] = i
    reply[#reply + 1] = code
  end
end
redis.call('HDEL', KEYS[9], '') -- the opener, see lease
if #z > 0 then
  redis.call('ZADD', KEYS[1], unpack(z))
  redis.call('HINCRBY', KEYS[9], 'c:rescheduled', #z / 2)
end
return { #z / 2, unpack(reply) }
