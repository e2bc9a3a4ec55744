-- Histogram bounds in ms, the last one open. Kept in Redis because a function's memory dies with it; one HINCRBY a touched
-- bucket a call, nothing a task. The sum of all buckets is the counter of leased (l:) or acked (d:) tasks.
local bounds = { 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 30000, 60000, 300000, 3600000, math.huge }
local names = { '1', '2', '5', '10', '20', '50', '100', '200', '500', '1000', '2000', '5000', '10000', '30000', '60000', '300000', '3600000', 'inf' }

local function bucket(ms)
  local b = 1
  while ms > bounds[b] do b = b + 1 end
  return b
end

local function raise(meta, prefix, hits, sum)
  for b, n in pairs(hits) do
    redis.call('HINCRBY', meta, prefix .. names[b], n)
  end
  if sum >= 1 then redis.call('HINCRBY', meta, prefix .. 'sum', int(sum)) end
end
