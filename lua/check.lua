--[[
Compares tasks with the revisions that a ledger has of them. Reads only.
KEYS[1]  pending     ZSET id by due us
KEYS[2]  processing  ZSET id by visibility deadline us
KEYS[3]  dead        ZSET id by time of death us
KEYS[4]  tasks       HASH id -> encoded task
KEYS[5]  state       HASH id -> flag, token, counts
KEYS[9]  meta        HASH
KEYS[12] revs        HASH id -> revision in the ledger
ARGV[1]  n, 1 to 500
ARGV[2]  from here: n ids, n revisions (1 to 2^53)
Returns  {same, i, code, ...} for the exceptions: -2 not there (UNKNOWN), -13 at an older revision or at none (OLDER), -8 at a newer
         one (NEWER), -16 in quarantine at this revision or an older one (QUARANTINED), -14 in pieces (BROKEN);
         {-9} no such shard of a ledger (NO_EPOCH)
]]
--- @include "unpack"
--- @include "batch"
--- @include "revs"
local n = tonumber(ARGV[1])
local bad = bad_batch(n, #ARGV, 1 + 2 * n)
if bad then return bad end
local m = redis.call('HMGET', KEYS[9], 'epoch', 'mode')
if not m[1] or m[2] ~= 'ledger' then return { -9 } end
local revs = redis.call('HMGET', KEYS[12], unpack(ARGV, 2, n + 1))
local waiting = redis.call('ZMSCORE', KEYS[1], unpack(ARGV, 2, n + 1))
local running = redis.call('ZMSCORE', KEYS[2], unpack(ARGV, 2, n + 1))
local died = redis.call('ZMSCORE', KEYS[3], unpack(ARGV, 2, n + 1))
local reply = {}
for i = 1, n do
  local id, rev, at = ARGV[1 + i], tonumber(ARGV[n + 1 + i]), tonumber(revs[i] or '0')
  local record, code = redis.call('HEXISTS', KEYS[4], id) == 1, 1
  if not record and not revs[i] and not waiting[i] and not running[i] and not died[i] then
    code = -2
  elseif not whole(record, waiting[i], running[i], died[i], not running[i] or redis.call('HEXISTS', KEYS[5], id) == 1) then
    code = -14
  elseif at > rev then
    code = -8
  elseif died[i] then
    code = -16
  elseif at < rev then
    code = -13
  end
  if code ~= 1 then
    reply[#reply + 1] = i
    reply[#reply + 1] = code
  end
end
return { n - #reply / 2, unpack(reply) }
