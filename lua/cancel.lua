--[[
Cancels tasks and says what really happened. A waiting task, or one whose lease has run out, is gone at once; a running one
is told to stop, its ack still wins, and anything else ends it as cancelled.
KEYS[1]  pending     ZSET id by due us
KEYS[2]  processing  ZSET id by visibility deadline us
KEYS[3]  dead        ZSET id by time of death us
KEYS[4]  tasks       HASH id -> encoded task
KEYS[5]  state       HASH id -> flag, token, counts
KEYS[6]  done:0      HASH tombstones
KEYS[7]  done:1      HASH tombstones
KEYS[8]  errors      HASH id -> reason and last error
KEYS[9]  meta        HASH
ARGV[1]  clock override in ms, 0 = the server's
ARGV[2]  n, 1 to 500
ARGV[3]  from here: n distinct ids
Returns  {cancelled, i, code, ...} for the exceptions: 6 running, told to stop (RUNNING), 5 cancelled before (CANCELLED_BEFORE),
         3 finished (FINISHED), -5 dead (DEAD), -2 no such task (UNKNOWN); {-15} kept by a ledger
         (MODE)
]]
--- @include "unpack"
--- @include "now"
--- @include "batch"
--- @include "tombs"
--- @include "end_cancelled"
local n = tonumber(ARGV[2])
local bad = bad_batch(n, #ARGV, 2 + n)
if bad then return bad end
local t = now(ARGV[1])
local m = redis.call('HMGET', KEYS[9], 'tp', 'tr', 'ret', 'mode')
if m[4] then return { -15 } end
local waiting = redis.call('ZMSCORE', KEYS[1], unpack(ARGV, 3, n + 2))
local running = redis.call('ZMSCORE', KEYS[2], unpack(ARGV, 3, n + 2))
local entries = redis.call('HMGET', KEYS[5], unpack(ARGV, 3, n + 2))
local g = tombs(m[1], m[2], m[3], KEYS[6], KEYS[7], t)
redis.call('HLEN', KEYS[4])
redis.call('HLEN', KEYS[8])
redis.call('HLEN', g.cur)
redis.call('HLEN', g.prev)
local from_pending, from_processing, h, reply = {}, {}, {}, {}
for i = 1, n do
  local id, e, code = ARGV[2 + i], entries[i], 1
  if waiting[i] then
    from_pending[#from_pending + 1] = id
  elseif running[i] then
    if e and tonumber(running[i]) > t then
      code = 6
      if string.byte(e, 1) ~= 67 then
        h[#h + 1] = id
        h[#h + 1] = 'C' .. string.sub(e, 2)
      end
    else
      from_processing[#from_processing + 1] = id
    end
  elseif redis.call('ZSCORE', KEYS[3], id) then
    code = -5
  else
    local tomb = tomb_of(g, id)
    code = tomb == 'cancelled' and 5 or tomb and 3 or -2
  end
  if code ~= 1 then
    reply[#reply + 1] = i
    reply[#reply + 1] = code
  end
end
redis.call('HDEL', KEYS[9], '') -- the opener, see lease
local done = #from_pending + #from_processing > 0 and open_tombs(g, KEYS[9], t)
if #h > 0 then
  redis.call('HSET', KEYS[5], unpack(h))
  redis.call('HINCRBY', KEYS[9], 'cv', 1) -- workers see it change in their next lease reply
end
end_cancelled(from_pending, done, KEYS[1], KEYS[4], KEYS[5], KEYS[8], KEYS[9])
end_cancelled(from_processing, done, KEYS[2], KEYS[4], KEYS[5], KEYS[8], KEYS[9])
return { #from_pending + #from_processing, unpack(reply) }
