--[[
Pages through one state of a shard, most overdue first, or through its dead letters from the last to die, in O(log n + page). Reads
only. The cursor is the last id seen with its score, so a page does not shift when others finish or die, nor when that one is gone.
KEYS[1]  pending     ZSET id by due us
KEYS[2]  processing  ZSET id by visibility deadline us
KEYS[3]  dead        ZSET id by time of death us
ARGV[1]  clock override in ms, 0 = the server's
ARGV[2]  pending (not yet due), due, processing, expired (leases that have run out: due, too) or dead
ARGV[3]  page size, 1 to 500
ARGV[4]  cursor: score of the last one seen, empty = from the start
ARGV[5]  cursor: id of the last one seen
ARGV[6]  newest: the last to die first, of dead alone; else empty
Returns  {id, score, ...}
]]
--- @include "now"
local t = now(ARGV[1])
local state, size, score, id, newest = ARGV[2], tonumber(ARGV[3]), ARGV[4], ARGV[5], ARGV[6] == 'newest'
local at = int(t)
local key, first, stop = KEYS[1], 0, -1
if state == 'dead' then
  key = KEYS[3]
else
  if state == 'processing' or state == 'expired' then key = KEYS[2] end
  local due = redis.call('ZCOUNT', key, '-inf', at)
  if state == 'due' or state == 'expired' then stop = due else first = due end
end

-- before compares ids as Redis sorts those of one score: by bytes. Lua's own < goes by locale.
local function before(a, b)
  for i = 1, math.min(#a, #b) do
    local x, y = string.byte(a, i), string.byte(b, i)
    if x ~= y then return x < y end
  end
  return #a < #b
end

if score ~= '' then
  local low, high = redis.call('ZCOUNT', key, '-inf', '(' .. score), redis.call('ZCOUNT', key, '-inf', score)
  while low < high do -- the first behind the cursor among the ids of its score; for newest, the cursor's own place
    local mid = math.floor((low + high) / 2)
    local at_mid = redis.call('ZRANGE', key, mid, mid)[1]
    local behind = before(id, at_mid) or newest and id == at_mid
    if behind then high = mid else low = mid + 1 end
  end
  if newest then stop = low else first = math.max(first, low) end
elseif newest then
  stop = redis.call('ZCOUNT', key, '-inf', '(9007199254740991') -- the sentinel stands last
end
if newest then first = math.max(0, stop - size) end
local last = first + size - 1
if stop >= 0 then last = math.min(last, stop - 1) end
if last < first then return {} end
local page = redis.call('ZRANGE', key, first, last, 'WITHSCORES')
if page[#page - 1] == '' then -- the sentinel
  page[#page] = nil
  page[#page] = nil
end
if newest then -- turned round here, not by ZREVRANGE, so that ids of one score have one order on every server
  local turned = {}
  for i = #page - 1, 1, -2 do
    turned[#turned + 1] = page[i]
    turned[#turned + 1] = page[i + 1]
  end
  page = turned
end
return page
