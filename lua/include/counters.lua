-- Counters of ledger mode come with the call that tells of the events: k pairs of field and amount among args, after place first.
local function bad_counters(args, first, k)
  for j = first + 1, first + 2 * k, 2 do
    if not string.match(args[j], '^[ef]:') or not string.match(args[j + 1], '^%d+$') then
      return redis.error_reply('ERR delayq: malformed counter')
    end
  end
  return nil
end

local function add_counters(meta, args, first, k)
  for j = first + 1, first + 2 * k, 2 do
    if args[j + 1] ~= '0' then redis.call('HINCRBY', meta, args[j], args[j + 1]) end
  end
end
