--[[
Makes workers ask the ledger about their tasks at once: one of them was told to stop there. They see the number change in their
next lease reply.
KEYS[9]  meta        HASH
Returns  {1}; {-9} no such shard of a ledger (NO_EPOCH)
]]
local m = redis.call('HMGET', KEYS[9], 'epoch', 'mode')
if not m[1] or m[2] ~= 'ledger' then return { -9 } end
redis.call('HDEL', KEYS[9], '') -- the opener, see lease
redis.call('HINCRBY', KEYS[9], 'cv', 1)
return { 1 }
