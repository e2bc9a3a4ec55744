-- A due time comes from Go as a delay in ms ("1500") or an instant in ms ("@1790000000000"). Equal ones differ by their place in
-- the call, in microseconds, which keeps their order.
local digits = { '0', '1', '2', '3', '4', '5', '6', '7', '8', '9' }

local function due_score(t, due, i)
  if string.byte(due) == 64 then return int(string.sub(due, 2) * 1000 + i - 1) end
  return int(t + due * 1000 + i)
end

-- even_scores fills z with score and id, score and id, for ids of one due time. Printing a number is the dearest thing that a
-- script does a task, so all but the last digits are printed once.
local function even_scores(t, due, ids, z)
  local n = #ids
  local us, i = nil, 1
  if string.byte(due) == 64 then us = string.sub(due, 2) * 1000 - 1 else us = t + due * 1000 end
  while i <= n do
    local low = (us + i) % 1000
    local head = int((us + i - low) / 1000)
    while i <= n and low < 1000 do
      local ones = low % 10
      local tens = (low - ones) / 10 % 10
      local most = head .. digits[(low - ones - 10 * tens) / 100 + 1] .. digits[tens + 1]
      low = low - ones + 10
      while i <= n and ones < 10 do
        ones = ones + 1
        z[2 * i - 1] = most .. digits[ones]
        z[2 * i] = ids[i]
        i = i + 1
      end
    end
  end
end
