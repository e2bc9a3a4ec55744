-- end_cancelled ends tasks as cancelled: tombstones first, then record, membership, state, error.
local function end_cancelled(ids, done, zset, tasks, state, errors, meta)
  if #ids == 0 then return end
  local graves = {}
  for i = 1, #ids do
    graves[2 * i - 1] = ids[i]
    graves[2 * i] = 'cancelled'
  end
  redis.call('HSET', done, unpack(graves))
  redis.call('HDEL', tasks, unpack(ids))
  redis.call('ZREM', zset, unpack(ids))
  redis.call('HDEL', state, unpack(ids))
  redis.call('HDEL', errors, unpack(ids))
  redis.call('HINCRBY', meta, 'c:cancelled', #ids)
end
