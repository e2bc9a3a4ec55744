package doctor

// A Code names a fault that is looked for; with severity OK it was not found. The set is closed.
type Code string

// The codes.
const (
	// Trigger.
	NoRun          Code = "no_run"
	NoConsumer     Code = "no_consumer"
	StaleConsumers Code = "stale_consumers"
	NoTypeHandler  Code = "type_without_consumer"

	// State.
	RedisDown       Code = "redis_down"
	RedisOld        Code = "redis_version"
	RedisSkew       Code = "redis_skew"
	Eviction        Code = "eviction_policy"
	Evicted         Code = "evicted_keys"
	Memory          Code = "memory"
	SaveFailed      Code = "save_failed"
	Restarted       Code = "redis_restarted"
	NoQueues        Code = "no_queues"
	LeftOut         Code = "queues_left_out"
	NotListed       Code = "queues_not_listed"
	QueueMissing    Code = "queue_missing"
	QueueUnread     Code = "queue_unreadable"
	SchemaMismatch  Code = "schema_mismatch"
	NeedsLedger     Code = "needs_ledger"
	DataLost        Code = "data_lost"
	Overdue         Code = "overdue"
	BacklogGrowing  Code = "backlog_growing"
	ShardLarge      Code = "shard_large"
	RecordsMissing  Code = "records_missing"
	AuditViolations Code = "audit_violations"
	NotRead         Code = "not_read"

	// Execution.
	StuckConsumers Code = "stuck_consumers"
	StuckHandlers  Code = "stuck_handlers"
	LongRun        Code = "long_run"
	ConsumerSkew   Code = "consumer_skew"
	NoHandler      Code = "no_handler"
	FailureRate    Code = "failure_rate"
	DeadRising     Code = "dead_rising"
	DeadTrimmed    Code = "dead_trimmed"
	LostLeases     Code = "lost_leases"
	StaleCalls     Code = "stale_calls"

	// Downstream.
	DatabaseDown   Code = "database_down"
	DatabaseSchema Code = "database_schema"
	DatabaseSkew   Code = "database_skew"
	Timeouts       Code = "timeouts"
	Slow           Code = "slow_handlers"
	Drift          Code = "drift"
	Unrepaired     Code = "drift_unrepaired"
	NoReconcile    Code = "no_reconcile"
	Quarantined    Code = "quarantined"
	Unconfirmed    Code = "unconfirmed"
)

const runbook = "docs/runbook.md"

// anchors are the sections of the runbook, which are named like the alerts.
var anchors = map[Code]string{
	NoRun:           "delayqnorun",
	NoConsumer:      "delayqunserved",
	StaleConsumers:  "delayqconsumerdown",
	NoTypeHandler:   "delayqnohandler",
	RedisDown:       "delayqredisdown",
	RedisSkew:       "delayqclockskew",
	Eviction:        "delayqevictionunsafe",
	Evicted:         "delayqkeysevicted",
	Memory:          "delayqredismemoryfull",
	SaveFailed:      "delayqredissavefailed",
	Restarted:       "delayqredislostdata",
	LeftOut:         "delayqqueuesleftout",
	NotListed:       "delayqqueuesunlisted",
	QueueMissing:    "delayqqueuegone",
	QueueUnread:     "delayqscrapeerror",
	SchemaMismatch:  "delayqscrapeerror",
	NeedsLedger:     "delayqscrapeerror",
	DataLost:        "delayqredislostdata",
	Overdue:         "delayqoldestdue",
	BacklogGrowing:  "delayqbackloggrowing",
	ShardLarge:      "delayqshardlarge",
	RecordsMissing:  "delayqrecordsmissing",
	AuditViolations: "delayqrecordsmissing",
	NotRead:         "delayqscrapeerror",
	StuckConsumers:  "delayqconsumerstuck",
	StuckHandlers:   "delayqconsumerstuck",
	LongRun:         "delayqprocessingold",
	ConsumerSkew:    "delayqconsumerclockskew",
	NoHandler:       "delayqnohandler",
	FailureRate:     "delayqfailurerate",
	DeadRising:      "delayqdeadrising",
	DeadTrimmed:     "delayqdeadtrimmed",
	LostLeases:      "delayqlostleases",
	StaleCalls:      "delayqstalecalls",
	DatabaseDown:    "delayqscrapeerror",
	DatabaseSchema:  "delayqscrapeerror",
	DatabaseSkew:    "delayqclockskew",
	Timeouts:        "delayqfailurerate",
	Slow:            "delayqlatenesshigh",
	Drift:           "delayqdriftpersists",
	Unrepaired:      "delayqdriftunrepaired",
	NoReconcile:     "delayqreconcilestale",
	Quarantined:     "delayqquarantined",
	Unconfirmed:     "delayqsucceededunconfirmed",
}
