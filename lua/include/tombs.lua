-- Tombstones live in two generations of a HASH: id -> token of whoever finished it, or the word cancelled. tp says which
-- generation is current, tr when to rotate; an id is remembered for ret to 2 x ret, and none is removed by itself.
local function tombs(tp, tr, ret, done0, done1, t)
  local g = { cur = done0, prev = done1, tp = tp or '0', tr = tonumber(tr or '0'), ret = tonumber(ret or '120000') * 1000 }
  if g.tp == '1' then g.cur, g.prev = done1, done0 end
  g.cur_counts = t < g.tr + g.ret -- a current one that outlived its rotation is as stale as a previous one
  g.prev_counts = t < g.tr
  return g
end

-- tomb_of returns the tombstone of one id, or false.
local function tomb_of(g, id)
  return (g.cur_counts and redis.call('HGET', g.cur, id)) or (g.prev_counts and redis.call('HGET', g.prev, id))
end

-- wipe empties a generation but for its empty field. A small one is emptied by name, so that the key stays in being: while a
-- cluster moves a slot, no script can make a missing key again. A large one is freed in the background; if that falls into
-- such a move the script fails here, and calls wait for the end of the move.
local function wipe(key)
  if redis.call('HLEN', key) > 1000 then redis.call('UNLINK', key) end
  redis.call('HSET', key, '', '')
  local ids = {}
  for _, id in ipairs(redis.call('HKEYS', key)) do
    if id ~= '' then ids[#ids + 1] = id end
  end
  if #ids > 0 then redis.call('HDEL', key, unpack(ids)) end
end

-- open_tombs returns the HASH to write to, rotated first when its time has come: a writer that does not rotate would
-- write into a dying generation. It comes before any other write, since it may fail.
local function open_tombs(g, meta, t)
  if t < g.tr then return g.cur end
  wipe(g.prev)
  if not g.cur_counts then wipe(g.cur) end
  g.cur, g.prev = g.prev, g.cur
  g.tp = g.tp == '1' and '0' or '1'
  g.tr = (g.cur_counts and g.tr or t) + g.ret -- counted from now, a late rotation would keep the old ones too long
  redis.call('HSET', meta, 'tp', g.tp, 'tr', int(g.tr))
  return g.cur
end
