-- now returns the server's clock in whole microseconds, read once per script. All scores are in this unit: integers of 16
-- digits are exact in a double until 2255, and much cheaper to print and parse than milliseconds with a fraction.
-- A test passes a positive override in ms.
local function now(override)
  local ms = tonumber(override)
  if ms > 0 then return math.floor(ms * 1000 + 0.5) end
  local t = redis.call('TIME')
  return t[1] * 1000000 + t[2]
end

-- int prints a number for a command: Lua itself would print 1.79e+15 and lose digits.
local function int(n) return string.format('%.0f', n) end
