-- Tombstones live in two generations of a HASH: id -> token of whoever finished it, or the word cancelled. tp says which
-- generation is current, tr when to rotate; an id is remembered for ret to 2 x ret, and a purge is one UNLINK.
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

-- open_tombs returns the HASH to write to, rotated first when its time has come: a writer that does not rotate would
-- write into a dying generation. The empty field keeps a key in being (a missing key breaks scripts while a cluster
-- moves a slot).
local function open_tombs(g, meta, t)
  if t < g.tr then return g.cur end
  redis.call('UNLINK', g.prev)
  if not g.cur_counts then
    redis.call('UNLINK', g.cur)
    redis.call('HSET', g.cur, '', '')
  end
  g.cur, g.prev = g.prev, g.cur
  g.tp = g.tp == '1' and '0' or '1'
  g.tr = (g.cur_counts and g.tr or t) + g.ret -- counted from now, a late rotation would keep the old ones too long
  redis.call('HSET', g.cur, '', '')
  redis.call('HSET', meta, 'tp', g.tp, 'tr', int(g.tr))
  return g.cur
end
