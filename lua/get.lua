--[[
Describes tasks by id. Reads only.
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
ARGV[3]  most bytes of encoded tasks to answer; one task always fits
ARGV[4]  from here: n ids
Returns  {now us, {pending score, processing score, dead score, encoded task, state entry, error, tombstone}, ...}, empty
         text for what is not there; fewer than n entries when the bytes ran out
]]
--- @include "unpack"
--- @include "now"
--- @include "batch"
--- @include "tombs"
local n, cap = tonumber(ARGV[2]), tonumber(ARGV[3])
local bad = bad_batch(n, #ARGV, 3 + n)
if bad then return bad end
local t = now(ARGV[1])
local m = redis.call('HMGET', KEYS[9], 'tp', 'tr', 'ret')
local g = tombs(m[1], m[2], m[3], KEYS[6], KEYS[7], t)
local waiting = redis.call('ZMSCORE', KEYS[1], unpack(ARGV, 4, n + 3))
local running = redis.call('ZMSCORE', KEYS[2], unpack(ARGV, 4, n + 3))
local died = redis.call('ZMSCORE', KEYS[3], unpack(ARGV, 4, n + 3))
local entries = redis.call('HMGET', KEYS[5], unpack(ARGV, 4, n + 3))
local errors = redis.call('HMGET', KEYS[8], unpack(ARGV, 4, n + 3))
local reply, bytes = { t }, 0
for i = 1, n do
  local id = ARGV[3 + i]
  local blob = redis.call('HGET', KEYS[4], id)
  if i > 1 and blob and bytes + #blob > cap then break end
  if blob then bytes = bytes + #blob end
  reply[#reply + 1] = {
    waiting[i] or '', running[i] or '', died[i] or '', blob or '', entries[i] or '', errors[i] or '', tomb_of(g, id) or '',
  }
end
return reply
