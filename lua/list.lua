--[[
Pages through one state of a shard, most overdue first, in O(log n + page). Reads only. The cursor is the last id seen with
its score, so a page does not shift when others finish.
KEYS[1]  pending     ZSET id by due ms
KEYS[2]  processing  ZSET id by visibility deadline ms
KEYS[3]  dead        ZSET id by time of death ms
ARGV[1]  clock override in ms, 0 = the server's
ARGV[2]  pending (not yet due), due, processing or dead
ARGV[3]  page size, 1 to 500
ARGV[4]  cursor: score of the last one seen, empty = from the start
ARGV[5]  cursor: id of the last one seen
Returns  {id, score, ...}
]]
--- @include "now"
local t = now(ARGV[1])
local state, size, score, id = ARGV[2], tonumber(ARGV[3]), ARGV[4], ARGV[5]
local ms = string.format('%.3f', t)
local key, stop = KEYS[1], -1
local first = 0
if state == 'processing' then
  key = KEYS[2]
  first = redis.call('ZCOUNT', key, '-inf', ms) -- expired leases are due, not running
elseif state == 'dead' then
  key = KEYS[3]
else
  local due = redis.call('ZCOUNT', key, '-inf', ms)
  if state == 'due' then stop = due else first = due end
end
if score ~= '' then
  local rank = redis.call('ZRANK', key, id)
  if rank and tonumber(redis.call('ZSCORE', key, id)) == tonumber(score) then
    first = math.max(first, rank + 1)
  else
    first = math.max(first, redis.call('ZCOUNT', key, '-inf', score)) -- gone since: go on behind its instant
  end
end
local last = first + size - 1
if stop >= 0 then last = math.min(last, stop - 1) end
if last < first then return {} end
local page = redis.call('ZRANGE', key, first, last, 'WITHSCORES')
if page[#page - 1] == '' then -- the sentinel stands last
  page[#page] = nil
  page[#page] = nil
end
return page
