--[[
Leases due tasks, most overdue first: takes expired leases back, moves due members of pending to processing under the
caller's token, and tells when to come again. Safe to repeat with the same token: the same tasks are answered.
KEYS[1]  pending     ZSET id by due us
KEYS[2]  processing  ZSET id by visibility deadline us
KEYS[4]  tasks       HASH id -> encoded task
KEYS[5]  state       HASH id -> flag, token, counts
KEYS[6]  done:0      HASH tombstones
KEYS[7]  done:1      HASH tombstones
KEYS[8]  errors      HASH id -> reason and last error
KEYS[9]  meta        HASH
KEYS[10] req         HASH consumer -> token and deadline of its last lease call
KEYS[11] consumers   ZSET consumer by last call
KEYS[12] revs        HASH id -> revision in the ledger
KEYS[13] beats       HASH consumer -> time of its last beat, and what it said
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
ARGV[11] 1 = answer due times too
ARGV[12] 1 = the caller has a ledger: answer revisions too
Returns  {code, now, next, stay, cancel version, deadline, ids, blobs, dues, extras, missing, revs}, times in us
         code 1 leased now, 2 leased by an earlier send of this call (REPEAT); {-9} no such shard (NO_EPOCH), {-15} kept by
         a ledger and the caller has none (MODE)
         next: when something falls due, -1 nothing known; stay: 0 = a younger runner has taken over
         dues: scores of ids, one text with blanks between, if asked for
         extras: index, "deliveries:failed:lost" of tasks leased before
         missing: ids without a record, removed
         revs: revisions of ids, empty text for one without, if asked for
]]
--- @include "unpack"
--- @include "now"
--- @include "entry"
--- @include "tombs"
--- @include "end_cancelled"
--- @include "buckets"
local token, max, consumer, cap = ARGV[2], tonumber(ARGV[3]), ARGV[5], tonumber(ARGV[6])
if #ARGV ~= 12 or #token ~= 16 or max > 500 then return redis.error_reply('ERR delayq: malformed lease') end
local t = now(ARGV[1])
local at = int(t)
local m = redis.call('HMGET', KEYS[9], 'epoch', 'cv', 'maxp', 'tp', 'tr', 'ret', 'base:' .. ARGV[7], 'mode')
local ledger = ARGV[12] == '1'
if not m[1] or ledger and m[8] ~= 'ledger' then return { -9 } end -- or made again by a caller without a ledger
if m[8] and not ledger then return { -15 } end
local cv = tonumber(m[2] or '0')
local last = redis.call('HGET', KEYS[10], consumer)
if not last then redis.call('HLEN', KEYS[13]) end -- a new one clears up after old ones

-- The baton: base:<group> lists the youngest runners as "generation:runner" with blanks between, youngest first. Registering
-- is part of the first lease call, so a runner that dies before it works never sends the older one home.
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
    table.insert(list, 1, int(math.max(t, newest + 1)) .. ':' .. ARGV[8])
    base = table.concat(list, ' ', 1, math.min(#list, keep))
  else
    stay = 0
  end
end

local function revs_of(ids)
  local revs = ledger and #ids > 0 and redis.call('HMGET', KEYS[12], unpack(ids)) or {}
  for i = 1, #revs do revs[i] = revs[i] or '' end
  return revs
end

-- A repeat: deadline and token find the batch, so no list of ids is kept. A deadline that has passed makes a fresh call.
if last and string.sub(last, 1, 16) == token and tonumber(string.sub(last, 17)) > t then
  local deadline = string.sub(last, 17)
  local ids, blobs, scores, extras = {}, {}, {}, {}
  for offset = 0, 3500, 500 do -- other leases may end at the same instant
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
          local d, f, l = counts(es[i])
          if d > 1 then
            extras[#extras + 1] = #ids
            extras[#extras + 1] = d .. ':' .. f .. ':' .. l
          end
        end
      end
    end
  end
  redis.call('HDEL', KEYS[9], '')
  redis.call('ZADD', KEYS[11], at, consumer)
  return { 2, t, t, stay, cv, tonumber(deadline), ids, blobs, table.concat(scores, ' '), extras, {}, revs_of(ids) }
end

-- Take back what has expired, at most max, with the score unchanged: fresh and expired then merge in time order and neither
-- starves. Not the original due time: a task that kills its consumers would stand first for ever.
local head = redis.call('ZRANGE', KEYS[2], 0, 0, 'WITHSCORES')
local back, marks, stopped = {}, {}, {}
if head[2] and tonumber(head[2]) <= t and max > 0 then
  local expired = redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', at, 'WITHSCORES', 'LIMIT', 0, max)
  local ids = {}
  for i = 1, #expired, 2 do ids[#ids + 1] = expired[i] end
  local entries = redis.call('HMGET', KEYS[5], unpack(ids))
  for i = 1, #ids do
    local e = entries[i]
    if e and string.byte(e, 1) == 67 then
      stopped[#stopped + 1] = ids[i]
    else
      back[#back + 1] = expired[2 * i]
      back[#back + 1] = ids[i]
      if e then
        local d, f, l, start = counts(e)
        marks[#marks + 1] = ids[i]
        marks[#marks + 1] = 'E' .. string.sub(e, 2, 17) .. d .. ':' .. f .. ':' .. (l + 1) .. ':' .. start
      end
    end
  end
  redis.call('ZSCORE', KEYS[1], '')
  redis.call('ZCOUNT', KEYS[1], 1, 0)
  redis.call('HLEN', KEYS[4])
  redis.call('HLEN', KEYS[6])
  redis.call('HLEN', KEYS[7])
  redis.call('HLEN', KEYS[8])
  redis.call('ZCARD', KEYS[11])
  if ledger then redis.call('HLEN', KEYS[12]) end

  redis.call('HDEL', KEYS[9], '') -- the opener: a full Redis checks memory only until a script's first write
  local done = #stopped > 0 and open_tombs(tombs(m[4], m[5], m[6], KEYS[6], KEYS[7], t), KEYS[9], t)
  if #back > 0 then redis.call('ZADD', KEYS[1], unpack(back)) end
  if #marks > 0 then
    redis.call('HSET', KEYS[5], unpack(marks))
    redis.call('HINCRBY', KEYS[9], 'c:expired', #marks / 2)
  end
  end_cancelled(stopped, done, KEYS[2], KEYS[4], KEYS[5], KEYS[8], KEYS[9])
  if #back > 0 then redis.call('ZREMRANGEBYRANK', KEYS[2], 0, #back / 2 - 1) end
  head = redis.call('ZRANGE', KEYS[2], 0, 0, 'WITHSCORES')
end

-- Pick: the one more than asked for says whether more is due.
local due = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', at, 'LIMIT', 0, max + 1)
local k = math.min(#due, max)
local soonest = tonumber(head[2] or '9007199254740991')
if #due > k then
  soonest = t
else
  local after = redis.call('ZRANGE', KEYS[1], k, k, 'WITHSCORES')
  if after[2] then soonest = math.min(soonest, tonumber(after[2])) end
end

-- Read the records in chunks: a cap that is checked after reading all of them comes too late.
local ids, blobs, missing, n, taken = {}, {}, {}, 0, 0
local chunk = math.max(1, math.floor(cap / (tonumber(m[3]) + 1024)))
local widest, bytes, full = 4 * chunk, 0, false
while taken < k and not full do
  local upto = math.min(taken + chunk, k)
  local got = redis.call('HMGET', KEYS[4], unpack(due, taken + 1, upto))
  for i = 1, upto - taken do
    local blob = got[i]
    if not blob then
      missing[#missing + 1] = due[taken + i]
    elseif bytes + #blob > cap and n > 0 then
      full = true
      soonest = t
      break
    else
      n = n + 1
      bytes = bytes + #blob
      ids[n] = due[taken + i]
      blobs[n] = blob
    end
  end
  taken = upto
  chunk = math.min(2 * chunk, widest)
end

local next = soonest < 9e15 and soonest or -1
local before, oldest, youngest
local revs = revs_of(ids)
if n > 0 then
  before = redis.call('HMGET', KEYS[5], unpack(ids))
  oldest = redis.call('ZSCORE', KEYS[1], ids[1])
  youngest = redis.call('ZSCORE', KEYS[1], ids[n])
end
if #missing > 0 then
  redis.call('HLEN', KEYS[5])
  redis.call('HLEN', KEYS[8])
  redis.call('HLEN', KEYS[12])
end

redis.call('HDEL', KEYS[9], '') -- the opener
if redis.call('ZADD', KEYS[11], at, consumer) == 1 then
  local gone = redis.call('ZRANGEBYSCORE', KEYS[11], '-inf', int(t - 3600000000), 'LIMIT', 0, 100)
  if #gone > 0 then
    redis.call('HDEL', KEYS[10], unpack(gone))
    redis.call('HDEL', KEYS[13], unpack(gone))
    redis.call('ZREM', KEYS[11], unpack(gone))
  end
end
if base then redis.call('HSET', KEYS[9], 'base:' .. ARGV[7], base) end
if #missing > 0 then
  redis.call('ZREM', KEYS[1], unpack(missing))
  redis.call('HDEL', KEYS[5], unpack(missing))
  redis.call('HDEL', KEYS[8], unpack(missing))
  redis.call('HDEL', KEYS[12], unpack(missing))
  redis.call('HINCRBY', KEYS[9], 'c:missing', #missing)
end
if n == 0 then return { 1, t, next, stay, cv, 0, ids, blobs, '', {}, missing, {} } end

-- From here on ids are the first n of pending. Lateness without reading every score, which Redis 7.0 prints at a fifth of
-- the price of the whole call: the first and the last bound it, and between them a ZCOUNT tells how many are later than a
-- bucket's bound. So the sum is an estimate.
local upper, least = (t - oldest) / 1000, (t - youngest) / 1000
local hits, late, counted, least_bucket = {}, 0, 0, bucket(least)
for b = bucket(upper), least_bucket, -1 do
  local later, lower = n, least
  if b > least_bucket then
    lower = bounds[b - 1]
    later = math.min(n, redis.call('ZCOUNT', KEYS[1], '-inf', '(' .. int(t - lower * 1000)))
  end
  if later > counted then hits[b] = later - counted end
  late = late + (later - counted) * (upper + lower) / 2
  counted, upper = later, lower
end
local scores = {}
if ARGV[11] == '1' then
  local with = redis.call('ZRANGE', KEYS[1], 0, n - 1, 'WITHSCORES')
  for i = 1, n do scores[i] = with[2 * i] end
end

local deadline = t + ARGV[4] * 1000
local dl = int(deadline)
local start = string.sub(at, 1, -4) -- in ms
local first = 'L' .. token .. '1:0:0:' .. start -- one shared text for all first deliveries
local z, h, extras = {}, {}, {}
for i = 1, n do
  local e, id = before[i], ids[i]
  z[2 * i - 1] = dl
  z[2 * i] = id
  h[2 * i - 1] = id
  if e then
    local d, f, l = counts(e)
    local sofar = (d + 1) .. ':' .. f .. ':' .. l
    h[2 * i] = 'L' .. token .. sofar .. ':' .. start
    extras[#extras + 1] = i
    extras[#extras + 1] = sofar
  else
    h[2 * i] = first
  end
end
redis.call('ZADD', KEYS[2], unpack(z))
redis.call('HSET', KEYS[5], unpack(h))
redis.call('HSET', KEYS[10], consumer, token .. dl)
redis.call('ZREMRANGEBYRANK', KEYS[1], 0, n - 1)
raise(KEYS[9], 'l:', hits, late)
return { 1, t, next, stay, cv, deadline, ids, blobs, table.concat(scores, ' '), extras, missing, revs }
