--[[
Notes what a worker says of itself, stamped with the server's clock, or takes it out when the worker's run has ended. Safe to
repeat. Goes to the first shard of a queue.
KEYS[9]  meta        HASH
KEYS[10] req         HASH consumer -> token and deadline of its last lease call
KEYS[11] consumers   ZSET consumer by last call
KEYS[13] beats       HASH consumer -> time of its last beat, and what it said
ARGV[1]  clock override in ms, 0 = the server's
ARGV[2]  consumer
ARGV[3]  what it says, up to 2048 bytes, opaque here; empty = it is gone
Returns  {code, now in us}
         code 1, -9 no such shard (NO_EPOCH)
]]
--- @include "unpack"
--- @include "now"
local consumer, record = ARGV[2], ARGV[3]
if #ARGV ~= 3 or consumer == '' or #record > 2048 then return redis.error_reply('ERR delayq: malformed beat') end
local t = now(ARGV[1])
local at = int(t)
if redis.call('HEXISTS', KEYS[9], 'epoch') == 0 then return { -9, t } end
local gone = redis.call('ZRANGEBYSCORE', KEYS[11], '-inf', int(t - 3600000000), 'LIMIT', 0, 100)
redis.call('HLEN', KEYS[10])
redis.call('HLEN', KEYS[13])
redis.call('HDEL', KEYS[9], '') -- the opener, see lease
if #gone > 0 then -- lease clears up only when it meets a new consumer, and the worker's first beat may have come before
  redis.call('HDEL', KEYS[10], unpack(gone))
  redis.call('HDEL', KEYS[13], unpack(gone))
  redis.call('ZREM', KEYS[11], unpack(gone))
end
redis.call('ZADD', KEYS[11], at, consumer)
if record == '' then
  redis.call('HDEL', KEYS[13], consumer)
else
  redis.call('HSET', KEYS[13], '', '', consumer, at .. ' ' .. record) -- with the sentinel: an older version may have made the shard
end
return { 1, t }
