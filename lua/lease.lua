--[[
Leases due tasks, most overdue first: takes expired leases back, moves due members of pending to processing under the
caller's token, and tells when to come again. Safe to repeat with the same token: the same tasks are answered.
KEYS[1]  pending     ZSET id by due ms
KEYS[2]  processing  ZSET id by visibility deadline ms
KEYS[4]  tasks       HASH id -> encoded task
KEYS[5]  state       HASH id -> flag, token, counts
KEYS[6]  done:0      HASH tombstones
KEYS[7]  done:1      HASH tombstones
KEYS[8]  errors      HASH id -> reason and last error
KEYS[9]  meta        HASH
KEYS[10] req         HASH consumer -> token and deadline of its last lease call
KEYS[11] consumers   ZSET consumer by last call
ARGV[1]  clock override in ms, 0 = the server's
ARGV[2]  token, 16 random bytes, new for each call
ARGV[3]  most tasks to lease, 0 to 500; 0 = only ask
ARGV[4]  lease in ms
ARGV[5]  consumer; one lease call of a consumer is under way at a time
ARGV[6]  most bytes of encoded tasks to answer; one task always fits
ARGV[7]  baton group, empty = none
ARGV[8]  runner id within the group
ARGV[9]  1 = the runner's first call: register it
ARGV[10] runners of the group that may stay
Returns  {code, now, next, stay, cancel version, deadline, ids, blobs, dues, extras, missing}, times in whole ms
         code 1 leased now, 2 leased by an earlier send of this call (REPEAT); {-9} no such shard (NO_EPOCH)
         next: when something falls due (rounded up), -1 nothing known; stay: 0 = a younger runner has taken over
         dues: scores of ids, one text with blanks between; extras: index, "deliveries:failed:lost" of tasks leased before
         missing: ids without a record, removed
]]
--- @include "unpack"
--- @include "now"
--- @include "entry"
--- @include "tombs"
--- @include "end_cancelled"
--- @include "buckets"
local token, max, consumer, cap = ARGV[2], tonumber(ARGV[3]), ARGV[5], tonumber(ARGV[6])
if #ARGV ~= 10 or #token ~= 16 or max > 500 then return redis.error_reply('ERR delayq: malformed lease') end
local t = now(ARGV[1])
local m = redis.call('HMGET', KEYS[9], 'epoch', 'cv', 'maxp', 'tp', 'tr', 'ret', 'base:' .. ARGV[7])
if not m[1] then return { -9 } end
local cv = tonumber(m[2] or '0')
local last = redis.call('HGET', KEYS[10], consumer)
redis.call('ZCARD', KEYS[1])

-- The baton: base:<group> lists the youngest runners as "generation:runner" with blanks between, youngest first. Registering is part of the
-- first lease call, so a runner that dies before it works never sends the older one home.
local stay, base = 1, nil
if ARGV[7] ~= '' then
  local keep, list, mine, newest = tonumber(ARGV[10]), {}, false, 0
  for gen, runner in string.gmatch(m[7] or '', '(%d+):(%S+)') do
    list[#list + 1] = gen .. ':' .. runner
    newest = math.max(newest, tonumber(gen))
    if runner == ARGV[8] then mine = #list end
  end
  if mine then
    stay = mine <= keep and 1 or 0
  elseif ARGV[9] == '1' or #list < keep then
    table.insert(list, 1, string.format('%.0f', math.max(math.floor(t), newest + 1)) .. ':' .. ARGV[8])
    base = table.concat(list, ' ', 1, math.min(#list, keep))
  else
    stay = 0
  end
end

-- reply_for builds the answer; entries holds the state entry of each id.
local function answer(code, next, deadline, ids, blobs, scores, entries, missing)
  local extras = {}
  for i = 1, #ids do
    local e = entries[i]
    if e then
      local d, f, l = counts(e)
      if d > 0 and (code == 1 or d > 1) then
        extras[#extras + 1] = i
        extras[#extras + 1] = (code == 1 and d + 1 or d) .. ':' .. f .. ':' .. l
      end
    end
  end
  return { code, math.floor(t), next, stay, cv, deadline, ids, blobs, table.concat(scores, ' '), extras, missing }
end

-- A repeat: deadline and token find the batch, so no list of ids is kept. A deadline that has passed makes a fresh call.
if last and string.sub(last, 1, 16) == token and tonumber(string.sub(last, 17)) > t then
  local deadline = string.sub(last, 17)
  local ids, blobs, scores, entries = {}, {}, {}, {}
  for offset = 0, 3500, 500 do -- other leases may end in the same ms
    local found = redis.call('ZRANGEBYSCORE', KEYS[2], deadline, deadline, 'LIMIT', offset, 500)
    if #found == 0 then break end
    local es = redis.call('HMGET', KEYS[5], unpack(found))
    for i = 1, #found do
      if held(es[i], token) then
        local blob = redis.call('HGET', KEYS[4], found[i])
        if blob then
          ids[#ids + 1] = found[i]
          blobs[#blobs + 1] = blob
          scores[#scores + 1] = '-' -- the due time left with the move
          entries[#entries + 1] = es[i]
        end
      end
    end
  end
  redis.call('HDEL', KEYS[9], '')
  redis.call('ZADD', KEYS[11], math.floor(t), consumer)
  return answer(2, math.ceil(t), tonumber(deadline), ids, blobs, scores, entries, {})
end

-- Take back what has expired, at most max, with the score unchanged: fresh and expired then merge in time order and neither
-- starves. Not the original due time: a task that kills its consumers would stand first for ever.
local head = redis.call('ZRANGE', KEYS[2], 0, 0, 'WITHSCORES')
local expired, entries = {}, {}
if head[2] and tonumber(head[2]) <= t and max > 0 then
  expired = redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', string.format('%.3f', t), 'WITHSCORES', 'LIMIT', 0, max)
  local ids = {}
  for i = 1, #expired, 2 do ids[#ids + 1] = expired[i] end
  if #ids > 0 then entries = redis.call('HMGET', KEYS[5], unpack(ids)) end
  redis.call('HLEN', KEYS[8])
  redis.call('HLEN', KEYS[6])
  redis.call('HLEN', KEYS[7])
end
redis.call('ZCARD', KEYS[11])

redis.call('HDEL', KEYS[9], '') -- the opener: a full Redis checks memory only until a script's first write
if base then redis.call('HSET', KEYS[9], 'base:' .. ARGV[7], base) end
local fresh_consumer = redis.call('ZADD', KEYS[11], math.floor(t), consumer) == 1
if fresh_consumer then
  local gone = redis.call('ZRANGEBYSCORE', KEYS[11], '-inf', math.floor(t - 3600000), 'LIMIT', 0, 100)
  if #gone > 0 then
    redis.call('HDEL', KEYS[10], unpack(gone))
    redis.call('ZREM', KEYS[11], unpack(gone))
  end
end

if #expired > 0 then
  local z, h, stopped = {}, {}, {}
  for i = 1, #expired, 2 do
    local id, e = expired[i], entries[(i + 1) / 2]
    if e and string.byte(e, 1) == 67 then
      stopped[#stopped + 1] = id
    else
      z[#z + 1] = expired[i + 1]
      z[#z + 1] = id
      if e then
        local d, f, l, start = counts(e)
        h[#h + 1] = id
        h[#h + 1] = 'E' .. string.sub(e, 2, 17) .. d .. ':' .. f .. ':' .. (l + 1) .. ':' .. start
      end
    end
  end
  if #z > 0 then redis.call('ZADD', KEYS[1], unpack(z)) end
  if #h > 0 then
    redis.call('HSET', KEYS[5], unpack(h))
    redis.call('HINCRBY', KEYS[9], 'c:expired', #h / 2)
  end
  if #stopped > 0 then
    local done = open_tombs(tombs(m[4], m[5], m[6], KEYS[6], KEYS[7], t), KEYS[9], t)
    end_cancelled(stopped, done, KEYS[2], KEYS[4], KEYS[5], KEYS[8], KEYS[9])
  end
  if #z > 0 then redis.call('ZREMRANGEBYRANK', KEYS[2], 0, #z / 2 - 1) end
  head = redis.call('ZRANGE', KEYS[2], 0, 0, 'WITHSCORES')
end

-- Pick: the one more than asked for says whether more is due.
local due = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', string.format('%.3f', t), 'WITHSCORES', 'LIMIT', 0, max + 1)
local k = math.min(#due / 2, max)
local soonest = tonumber(head[2] or '9007199254740991')
if #due / 2 > k then
  soonest = t
else
  local after = redis.call('ZRANGE', KEYS[1], k, k, 'WITHSCORES')
  if after[2] then soonest = math.min(soonest, tonumber(after[2])) end
end

-- Read the records in chunks: a cap that is checked after reading all of them comes too late.
local ids, blobs, scores, missing, taken = {}, {}, {}, {}, 0
local chunk = math.max(1, math.floor(cap / (tonumber(m[3]) + 1024)))
local widest, bytes = 4 * chunk, 0
while taken < k do
  local want = {}
  for i = taken + 1, math.min(taken + chunk, k) do want[#want + 1] = due[2 * i - 1] end
  local got = redis.call('HMGET', KEYS[4], unpack(want))
  local full = false
  for i = 1, #want do
    if got[i] and #ids > 0 and bytes + #got[i] > cap then
      full = true
      break
    end
    taken = taken + 1
    if got[i] then
      bytes = bytes + #got[i]
      ids[#ids + 1] = want[i]
      blobs[#blobs + 1] = got[i]
      scores[#scores + 1] = due[2 * taken]
    else
      missing[#missing + 1] = want[i]
    end
  end
  if full then
    soonest = t
    break
  end
  chunk = math.min(2 * chunk, widest)
end

local next = soonest < 9e15 and math.ceil(soonest) or -1
if taken == 0 then return answer(1, next, 0, ids, blobs, scores, ids, missing) end

local deadline = math.ceil(t + ARGV[4])
local dl = string.format('%.0f', deadline)
local before = #ids > 0 and redis.call('HMGET', KEYS[5], unpack(ids)) or {}
local start = string.format('%.0f', math.floor(t))
local first = 'L' .. token .. '1:0:0:' .. start -- one shared text for all first deliveries
local z, h, hits, late, b = {}, {}, {}, 0, #bounds
for i = 1, #ids do
  local e, ms = before[i], t - scores[i]
  z[2 * i - 1] = dl
  z[2 * i] = ids[i]
  h[2 * i - 1] = ids[i]
  if e then
    local d, f, l = counts(e)
    h[2 * i] = 'L' .. token .. (d + 1) .. ':' .. f .. ':' .. l .. ':' .. start
  else
    h[2 * i] = first
  end
  late = late + ms
  while b > 1 and ms <= bounds[b - 1] do b = b - 1 end -- scores rise, so lateness falls
  hits[b] = (hits[b] or 0) + 1
end
if #ids > 0 then
  redis.call('ZADD', KEYS[2], unpack(z))
  redis.call('HSET', KEYS[5], unpack(h))
  redis.call('HSET', KEYS[10], consumer, token .. dl)
  raise(KEYS[9], 'l:', hits, late)
end
redis.call('ZREMRANGEBYRANK', KEYS[1], 0, taken - 1)
if #missing > 0 then
  redis.call('HDEL', KEYS[5], unpack(missing))
  redis.call('HDEL', KEYS[8], unpack(missing))
  redis.call('HINCRBY', KEYS[9], 'c:missing', #missing)
end
return answer(1, next, deadline, ids, blobs, scores, before, missing)
