--[[
Lists consumers, the one that called last first, with what they said of themselves. Reads only.
KEYS[9]  meta        HASH
KEYS[11] consumers   ZSET consumer by last call
KEYS[13] beats       HASH consumer -> time of its last beat, and what it said
ARGV[1]  clock override in ms, 0 = the server's
ARGV[2]  how many to leave out from the front
ARGV[3]  how many to list, 1 to 500
Returns  {code, now in us, consumer, last call in us, beat, ...}; beat is empty for one that has sent none, or has ended
         code 1, -9 no such shard (NO_EPOCH)
]]
--- @include "unpack"
--- @include "now"
local skip, n = tonumber(ARGV[2]), tonumber(ARGV[3])
if #ARGV ~= 3 or not skip or skip < 0 or not n or n < 1 or n > 500 then
  return redis.error_reply('ERR delayq: malformed consumers')
end
local t = now(ARGV[1])
if redis.call('HEXISTS', KEYS[9], 'epoch') == 0 then return { -9, t } end
local reply, names = { 1, t }, {}
local found = redis.call('ZRANGE', KEYS[11], int(-1 - skip - n), int(-2 - skip), 'WITHSCORES') -- the last is the sentinel
for i = #found - 1, 1, -2 do
  if found[i] ~= '' then
    names[#names + 1] = found[i]
    reply[#reply + 1] = found[i]
    reply[#reply + 1] = found[i + 1]
    reply[#reply + 1] = ''
  end
end
if #names == 0 then return reply end
local beats = redis.call('HMGET', KEYS[13], unpack(names))
for i = 1, #names do reply[2 + 3 * i] = beats[i] or '' end
return reply
