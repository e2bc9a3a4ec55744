// Command monitor is a function that looks at queues: once a minute for CloudWatch, and for Prometheus whenever it is asked. Outside
// Lambda it looks once, and prints the metrics and a summary:
//
//	DELAYQ_REDIS_URL=redis://localhost:6379 DELAYQ_QUEUES=orders monitor -for 10s
package main

import "github.com/delayq/toolkit/functions"

func main() { functions.Start(functions.Monitor()) }
