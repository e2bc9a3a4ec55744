// Package functions runs delayq inside functions that live for seconds, such as AWS Lambda's.
//
// A function is compiled, so handlers plug in by import: write a main that gives a mux to
// [Worker], and what comes back to [Start].
//
//	func main() {
//		mux := delayq.NewMux()
//		delayq.Handle(mux, "order.cancel", cancelOrder)
//		functions.Start(functions.Worker(mux))
//	}
//
// Everything else is set in the function's environment, in variables that start with DELAYQ_:
// the fields of [Config] are their documentation. functions/worker is such a main,
// scripts/build-functions builds it, and template.yaml deploys it.
//
// # How a schedule becomes milliseconds
//
// A schedule fires once a minute, but tasks run within milliseconds of their time, because an
// invocation does not end when the queue is empty: it sleeps until the next task is due. The
// next tick starts another invocation, which takes the baton; the older one is told so by its
// next look at the queue, finishes what it has begun and returns. One runner works at a time,
// there is no gap, and if ticks are lost the old one goes on until its own deadline. So give the
// function a timeout of several ticks, and a reserved concurrency greater than Config.Runners.
//
// # With a ledger
//
// With DELAYQ_DATABASE_URL the queues have a ledger in PostgreSQL, whose schema "delayq migrate"
// makes: functions never change it, and their user needs no right to. The worker then claims there
// what it leases from Redis, and leases from it alone while Redis is away. A second function,
// functions/reconciler, repairs Redis from it once a minute, in slices that fit an invocation; see
// [Reconciler]. The pool of an environment is small and bears poolers by transaction, such as
// PgBouncer and RDS Proxy. A database that is away fails the invocation, and the next one tries again.
//
// # How the queues are
//
// A third function, functions/monitor, looks at the queues once a minute and writes what it sees to its log, in CloudWatch's Embedded
// Metric Format; template.yaml has alarms on these metrics. A tick of it succeeds although Redis or the database is away, because it has
// said so: the metrics are then RedisUp 0 and ScrapeError 1, and no number of an earlier look. When it can say nothing at all its
// invocation fails, and the metrics are missing; the alarm on ScrapeError takes that for the same.
//
// Counters are totals, as Redis keeps them; their growth is DIFF of the Maximum, in CloudWatch's metric math. A process that lives for
// a while cannot know what was counted before it or beside it.
//
// Behind a function URL the same program serves Prometheus: GET /metrics with "Authorization: Bearer" and DELAYQ_MONITOR_TOKEN. Lambda
// lets everybody call such a URL, so template.yaml gives it a function of its own: refused calls cannot use up the places of the ticks.
// See [Monitor].
//
// # What an invocation can leave behind
//
// Nothing, if it ends by itself: tasks it had not started are given back, tasks it had are done
// or given back without a charge to their attempts, and no lease is renewed between invocations,
// when the process is frozen. If it is killed, its tasks run again when their leases end.
package functions
