-- trim deletes the oldest dead letters beyond the cap, at most so many.
local function trim(dead, tasks, state, errors, versions, meta, cap, most)
  local excess = math.min(redis.call('ZCARD', dead) - 1 - cap, most)
  if excess <= 0 then return end
  local old = redis.call('ZRANGE', dead, 0, excess - 1)
  redis.call('HDEL', tasks, unpack(old))
  redis.call('HDEL', state, unpack(old))
  redis.call('HDEL', errors, unpack(old))
  redis.call('HDEL', versions, unpack(old))
  redis.call('ZREM', dead, unpack(old))
  redis.call('HINCRBY', meta, 'c:trimmed', #old)
end
