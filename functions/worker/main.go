// Command worker is a function that runs due tasks: the one template.yaml deploys, and the pattern
// for your own, which differs in its handlers. Outside Lambda it runs one invocation:
//
//	DELAYQ_REDIS_URL=redis://localhost:6379 DELAYQ_QUEUES=orders worker -for 55s
package main

import "github.com/delayq/toolkit/functions"

func main() { functions.Start(functions.Worker(handlers())) }
