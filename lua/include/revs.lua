-- An entry of a ledger queue is whole when it has a record, is in exactly one of pending, processing, dead, and has a state if it is
-- in processing. What is not whole counts as no entry.
local function whole(record, waiting, running, died, state)
  if not record then return false end
  if running then return state and not waiting and not died end
  return waiting and not died or died and not waiting
end

-- tomb_rev is the revision in a tombstone: "rev:<revision>"; any other is of a time before the ledger.
local function tomb_rev(tomb) return tonumber(string.match(tomb or '', '^rev:(%d+)$') or '0') end
