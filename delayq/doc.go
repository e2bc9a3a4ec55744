// Package delayq is a delay queue on Redis: enqueue a task now, and a handler runs it when it is due.
//
//	q, err := delayq.Open(ctx, rdb, "orders", delayq.Config{})
//	_, err = q.Enqueue(ctx, delayq.Task{ID: "cancel-order:42", Type: "order.cancel", Payload: body}, delayq.In(30*time.Minute))
//
//	mux := delayq.NewMux()
//	mux.HandleFunc("order.cancel", cancelOrder)
//	stats, err := delayq.NewWorker(mux, q).Run(ctx)
//
// # What it promises
//
// At least once: a task that Redis has taken runs until it succeeds, is cancelled, or ends among the dead letters. It runs a
// second time only when its lease ran out (a crash, a stalled machine, a handler that ignores its context) or Redis lost
// data, so a handler must bear that. While Redis keeps its data a task has at most one live lease, and a consumer whose lease
// was lost can change nothing: it is told ErrLeaseLost.
//
// Never early by Redis' clock, and late by milliseconds while a worker runs. Most overdue first; tasks enqueued with equal
// delays keep their order. No order across shards, none among retries.
//
// Every call may be repeated after an error and gives the same answer: ids come from the caller, finished ids are remembered
// for Config.Retention, and calls whose reply was lost are resent inside.
//
// Tasks are as durable as the Redis they are in. A failover to a replica that lags, or a restart without persistence, loses
// what was not yet written.
//
// # Servers
//
// Redis 6.2 and later and what speaks like it, single, with Sentinel, or as a cluster; all keys of a shard share a hash tag, and
// scripts name every key they touch. The server must not evict keys without a time to live: maxmemory-policy noeviction, or a
// volatile one.
//
// # Compatibility
//
// The data of a queue has a schema version, which Open checks. Within one, older and newer versions of this package can work
// on the same queue at the same time; CHANGELOG.md says when a change needs an order of upgrades.
package delayq
