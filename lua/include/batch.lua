-- bad_batch tells a malformed call apart before anything is read or written: at most 500 ids (the bound that keeps a
-- script short and under the limit of unpack) and exactly the arguments that n asks for.
local function bad_batch(n, have, want)
  if n and n >= 1 and n <= 500 and have == want then return nil end
  return redis.error_reply('ERR delayq: malformed batch')
end
