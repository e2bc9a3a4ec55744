-- A state entry is flag(1) token(16) "deliveries:failed:lost:leaseStart", the start in ms. Flags: L leased, C leased and told to stop,
-- E lease expired, R retried, X released, B buried. The token outlives the lease, so that each verb can answer its own
-- repeat; hence holding a lease is flag AND token.
local function held(entry, token)
  if not entry then return false end
  local flag = string.byte(entry, 1)
  return (flag == 76 or flag == 67) and string.sub(entry, 2, 17) == token
end

local function counts(entry)
  local d, f, l, start = string.match(entry, '^(%d+):(%d+):(%d+):(%d+)', 18)
  return tonumber(d), tonumber(f), tonumber(l), start
end
