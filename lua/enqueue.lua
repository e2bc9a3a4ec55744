--[[
Adds tasks, each with its own outcome. An id that is known is left alone, or replaced while it waits. Refused by a full
Redis, on purpose: it is the one verb that fills it.
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
ARGV[2]  1 = replace a known id while it is pending, 0 = keep it
ARGV[3]  1 = an earlier send of this call may have been executed: a cancelled tombstone may then be this call's own end
ARGV[4]  n, 1 to 500
ARGV[5]  how many due times follow: n, or 1 that is for all
ARGV[6]  from here: n times id and encoded task, ids distinct, then due times ("1500" = delay in ms, "@1790000000000" = instant
         in ms)
Returns  {created, i, code, ...} for the exceptions: 2 created by an earlier send of this call (REPEAT), 3 replaced (REPLACED),
         4 cancelled, maybe after an earlier send (CANCELLED), -3 known and pending (PENDING), -4 processing (PROCESSING),
         -5 dead (DEAD), -6 done (DONE); {-9} no such shard (NO_EPOCH), {-15} kept by a ledger (MODE)
]]
--- @include "unpack"
--- @include "now"
--- @include "dues"
--- @include "batch"
--- @include "tombs"
local n = tonumber(ARGV[4])
local bad = bad_batch(n, #ARGV, 5 + 2 * n + tonumber(ARGV[5]))
if bad then return bad end
local t = now(ARGV[1])
local m = redis.call('HMGET', KEYS[9], 'epoch', 'tp', 'tr', 'ret', 'mode')
if not m[1] then return { -9 } end
if m[5] then return { -15 } end
local ids = {}
for i = 1, n do ids[i] = ARGV[2 * i + 4] end
local known = redis.call('HMGET', KEYS[4], unpack(ids))
local g = tombs(m[2], m[3], m[4], KEYS[6], KEYS[7], t)
local none = {}
local cur = g.cur_counts and redis.call('HMGET', g.cur, unpack(ids)) or none
local prev = g.prev_counts and redis.call('HMGET', g.prev, unpack(ids)) or none

local even = ARGV[5] == '1'
local function due_of(i) return due_score(t, ARGV[2 * n + 6 + (even and 0 or i - 1)], i) end

local fresh = true
for i = 1, n do
  if known[i] or cur[i] or prev[i] then
    fresh = false
    break
  end
end

if fresh then
  local z = {}
  if even then
    even_scores(t, ARGV[2 * n + 6], ids, z)
  else
    for i = 1, n do
      z[2 * i - 1] = due_of(i)
      z[2 * i] = ids[i]
    end
  end
  redis.call('ZADD', KEYS[1], unpack(z)) -- first: the one key that has not been read
  redis.call('HSET', KEYS[4], unpack(ARGV, 6, 2 * n + 5))
  redis.call('HINCRBY', KEYS[9], 'c:created', n)
  return { n }
end

local waiting = redis.call('ZMSCORE', KEYS[1], unpack(ids))
local running = redis.call('ZMSCORE', KEYS[2], unpack(ids))
local died = redis.call('ZMSCORE', KEYS[3], unpack(ids))
redis.call('HLEN', KEYS[5])
redis.call('HLEN', KEYS[6])
redis.call('HLEN', KEYS[7])
redis.call('HLEN', KEYS[8])
local created, replaced, refused, reply, h, z, renewed, unburied = 0, 0, 0, {}, {}, {}, {}, {}
local function write(i)
  h[#h + 1] = ids[i]
  h[#h + 1] = ARGV[2 * i + 5]
  z[#z + 1] = due_of(i)
  z[#z + 1] = ids[i]
end
for i = 1, n do
  local id, tomb = ids[i], cur[i] or prev[i]
  local code = 1
  if known[i] and known[i] == ARGV[2 * i + 5] then
    code = 2
  elseif running[i] then
    code = -4
  elseif died[i] then
    code = -5
  elseif waiting[i] and known[i] then
    code = ARGV[2] == '1' and 3 or -3
  elseif tomb and tomb ~= 'cancelled' then
    code = -6
  elseif tomb and ARGV[3] == '1' then
    code = 4
  end
  if code == 1 then
    created = created + 1
    write(i)
    if tomb then unburied[#unburied + 1] = id end
  else
    if code < 0 then refused = refused + 1 end
    if code == 3 then
      replaced = replaced + 1
      write(i)
      renewed[#renewed + 1] = id
    end
    reply[#reply + 1] = i
    reply[#reply + 1] = code
  end
end
if #h > 0 then
  redis.call('HSET', KEYS[4], unpack(h))
  redis.call('ZADD', KEYS[1], unpack(z))
end
if #renewed > 0 then -- a replaced task starts afresh: attempts and errors of the old one go
  redis.call('HDEL', KEYS[5], unpack(renewed))
  redis.call('HDEL', KEYS[8], unpack(renewed))
  redis.call('HINCRBY', KEYS[9], 'c:replaced', replaced)
end
if #unburied > 0 then
  redis.call('HDEL', KEYS[6], unpack(unburied))
  redis.call('HDEL', KEYS[7], unpack(unburied))
end
if created > 0 then redis.call('HINCRBY', KEYS[9], 'c:created', created) end
if refused > 0 then redis.call('HINCRBY', KEYS[9], 'c:duplicate', refused) end
return { created, unpack(reply) }
