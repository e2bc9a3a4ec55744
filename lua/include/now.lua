-- now returns the server's clock in ms, with its microseconds as fraction, read once per script.
-- A test passes a positive override in ms.
local function now(override)
  local ms = tonumber(override)
  if ms > 0 then return ms end
  local t = redis.call('TIME')
  return t[1] * 1000 + t[2] / 1000
end
