// Package ledger keeps the tasks of delay queues in PostgreSQL 14 or later, so that none is lost when Redis loses its data. Redis then
// is an index that can be rebuilt. Hand a Ledger to delayq.Config:
//
//	pool, err := pgxpool.New(ctx, url)
//	led, err := ledger.Open(ctx, pool) // after migrations.Up, or `delayq migrate`
//	q, err := delayq.Open(ctx, rdb, "orders", delayq.Config{Ledger: led})
//
//	err = ledger.BeginFunc(ctx, pool, func(tx *ledger.Tx) error {
//		if _, err := tx.Exec(ctx, "insert into orders ..."); err != nil {
//			return err
//		}
//		_, err := q.EnqueueTx(ctx, tx, task) // Redis hears of it after the commit
//		return err
//	})
//
// Everything is in the schema delayq. The view delayq.tasks is for people; all else may change with the version of the schema. It
// works in every query mode of pgx and behind PgBouncer in transaction mode: no statement relies on the session. Reads go to the
// primary; so must the pool.
package ledger
