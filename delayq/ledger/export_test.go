package ledger

// Tests that let a statement wait for a lock need it to wait until they have seen it, on a busy machine too.
func init() { lockWait = "2s" }
