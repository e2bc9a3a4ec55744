// Command reconciler is a function that repairs Redis from the ledger, a slice a minute. Outside
// Lambda it runs one invocation:
//
//	DELAYQ_REDIS_URL=redis://localhost:6379 DELAYQ_DATABASE_URL=postgres://localhost/shop DELAYQ_QUEUES=orders reconciler -for 55s
package main

import "github.com/delayq/toolkit/functions"

func main() { functions.Start(functions.Reconciler()) }
