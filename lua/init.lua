--[[
Creates a shard, or checks and describes the one that is there. Safe to repeat. Writes one sentinel into every container, so
that no key is ever missing (its score, 2^53-1, is later than any due time), and uses each write command once, so that a missing
ACL right shows here and not in the middle of another script.
KEYS[1]  pending     ZSET
KEYS[2]  processing  ZSET
KEYS[3]  dead        ZSET
KEYS[4]  tasks       HASH
KEYS[5]  state       HASH
KEYS[6]  done:0      HASH
KEYS[7]  done:1      HASH
KEYS[8]  errors      HASH
KEYS[9]  meta        HASH
KEYS[10] req         HASH
KEYS[11] consumers   ZSET
KEYS[12] revs        HASH
KEYS[13] beats       HASH
ARGV[1]  clock override in ms, 0 = the server's
ARGV[2]  1 = create when missing, 0 = only look
ARGV[3]  schema version of the caller
ARGV[4]  shards of the queue, 0 = as stored, 1 when new
ARGV[5]  tombstone retention in ms, 0 = as stored, 120000 when new
ARGV[6]  payload limit in bytes, 0 = as stored, 65536 when new
ARGV[7]  epoch for a new shard, a random id
ARGV[8]  mode of the caller: empty, or "ledger", which is stored and stays
Returns  {code, epoch, schema, shards, retention ms, payload limit, now in us}
         1 was there, 2 created, -10 no such queue (NO_QUEUE), -11 other shard count (SHARDS), -12 other schema (SCHEMA),
         -15 kept by a ledger, and the caller has none (MODE)
]]
--- @include "now"
local t = now(ARGV[1])
local m = redis.call('HMGET', KEYS[9], 'epoch', 'schema', 'shards', 'ret', 'maxp', 'mode')
local code = 1
if not m[1] then
  if ARGV[2] ~= '1' then return { -10, '', 0, 0, 0, 0, t } end
  code = 2
  m = { ARGV[7], ARGV[3], ARGV[4], ARGV[5], ARGV[6] }
  if m[3] == '0' then m[3] = '1' end
  if m[4] == '0' then m[4] = '120000' end
  if m[5] == '0' then m[5] = '65536' end
else
  if m[2] == ARGV[3] and ARGV[4] ~= '0' and ARGV[4] ~= m[3] then code = -11 end
  if m[6] and m[6] ~= ARGV[8] then code = -15 end
  if m[2] ~= ARGV[3] then code = -12 end
  if code == 1 and ARGV[5] ~= '0' then m[4] = ARGV[5] end
  if code == 1 and ARGV[6] ~= '0' then m[5] = ARGV[6] end
end
if code > 0 and ARGV[2] == '1' then
  if code == 1 then redis.call('HDEL', KEYS[9], '') end -- the opener: who drains a full Redis opens the queue first
  for _, k in ipairs({ 1, 2, 3, 11 }) do redis.call('ZADD', KEYS[k], '9007199254740991', '') end
  if code == 2 then redis.call('UNLINK', KEYS[6]) end
  for _, k in ipairs({ 4, 5, 6, 7, 8, 10, 12, 13 }) do redis.call('HSET', KEYS[k], '', '') end
  redis.call('HSET', KEYS[9], 'epoch', m[1], 'schema', m[2], 'shards', m[3], 'ret', m[4], 'maxp', m[5])
  if ARGV[8] ~= '' then redis.call('HSET', KEYS[9], 'mode', ARGV[8]) end
  -- What is there without its meta was made and counted before.
  redis.call('HINCRBY', KEYS[9], ARGV[8] == '' and 'c:created' or 'e:shown', code == 2 and redis.call('HLEN', KEYS[4]) - 1 or 0)
  redis.call('HDEL', KEYS[9], '')
  redis.call('ZREM', KEYS[1], string.rep('-', 257)) -- longer than an id can be
  redis.call('ZREMRANGEBYRANK', KEYS[1], 1, 0)
end
return { code, m[1], tonumber(m[2]), tonumber(m[3]), tonumber(m[4]), tonumber(m[5]), t }
