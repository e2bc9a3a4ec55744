--[[
Checks the invariants of single ids on a live shard. Reads only.
KEYS[1]  pending     ZSET id by due us
KEYS[2]  processing  ZSET id by visibility deadline us
KEYS[3]  dead        ZSET id by time of death us
KEYS[4]  tasks       HASH id -> encoded task
KEYS[5]  state       HASH id -> flag, token, counts
KEYS[8]  errors      HASH id -> reason and last error
KEYS[9]  meta        HASH
KEYS[12] revs        HASH id -> revision in the ledger
ARGV[1]  n, 1 to 500
ARGV[2]  from here: n ids
Returns  {i, text, ...} for each breach
]]
--- @include "unpack"
--- @include "batch"
local n = tonumber(ARGV[1])
local bad = bad_batch(n, #ARGV, 1 + n)
if bad then return bad end
local waiting = redis.call('ZMSCORE', KEYS[1], unpack(ARGV, 2, n + 1))
local running = redis.call('ZMSCORE', KEYS[2], unpack(ARGV, 2, n + 1))
local died = redis.call('ZMSCORE', KEYS[3], unpack(ARGV, 2, n + 1))
local entries = redis.call('HMGET', KEYS[5], unpack(ARGV, 2, n + 1))
local revs = redis.call('HMGET', KEYS[12], unpack(ARGV, 2, n + 1))
local ledger = redis.call('HGET', KEYS[9], 'mode')
local reply = {}
for i = 1, n do
  local function breach(text)
    reply[#reply + 1] = i
    reply[#reply + 1] = text
  end
  local id, e = ARGV[1 + i], entries[i]
  local places = (waiting[i] and 1 or 0) + (running[i] and 1 or 0) + (died[i] and 1 or 0)
  local record = redis.call('HEXISTS', KEYS[4], id) == 1
  if places > 1 then breach('I1 in more than one of pending, processing, dead') end
  if places == 0 and record then breach('I1 a record without membership') end
  if places > 0 and not record then breach('I1 a membership without record') end
  if e and not record then breach('I4 state of an unknown task') end
  if not e and not (ledger and record) and redis.call('HEXISTS', KEYS[8], id) == 1 then breach('I4 error of an unknown task') end
  if revs[i] and not record then breach('I4 revision of an unknown task') end
  if ledger and record and not revs[i] and not died[i] then breach('I4 a record without revision') end
  if revs[i] and not string.match(revs[i], '^%d+$') then breach('I4 malformed revision') end
  if e and not (string.match(e, '^[LCERXB]') and string.match(string.sub(e, 18), '^%d+:%d+:%d+:%d+$')) then
    breach('I3 malformed state entry')
  end
  if running[i] and not e then breach('I3 a lease without state') end
  if e then
    local flag = string.sub(e, 1, 1)
    if running[i] and flag ~= 'L' and flag ~= 'C' then breach('I3 flag ' .. flag .. ' of a leased task') end
    if waiting[i] and flag ~= 'E' and flag ~= 'R' and flag ~= 'X' then breach('I3 flag ' .. flag .. ' of a waiting task') end
    if died[i] and flag ~= 'B' then breach('I3 flag ' .. flag .. ' of a dead letter') end
  end
end
return reply
