-- verdict says what a call that ends a lease without success may do with one task: 1 go on, 4 it was cancelled: end it so,
-- 5 ended as cancelled by an earlier send, 2 a repeat, -1 lease lost, -2 unknown. flag is the one the verb leaves behind.
local function verdict(e, token, flag, g, id)
  if held(e, token) then return string.byte(e, 1) == 67 and 4 or 1 end
  if e then
    if string.byte(e, 1) == flag and string.sub(e, 2, 17) == token then return 2 end
    return -1
  end
  local tomb = tomb_of(g, id)
  if tomb == 'cancelled' then return 5 end
  return tomb and -1 or -2
end
