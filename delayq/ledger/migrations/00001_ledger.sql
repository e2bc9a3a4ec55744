-- +goose Up

CREATE TYPE delayq.status AS ENUM ('pending', 'retry', 'running', 'succeeded', 'cancelled', 'dead');

-- The revisions of all tasks. Redis compares them as doubles, hence the bound; the bits from 40 on are the epoch, see Ledger.RaiseEpoch.
CREATE SEQUENCE delayq.rev AS bigint MAXVALUE 9007199254740991 CACHE 1;

CREATE TABLE delayq.queue (
    id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name text NOT NULL UNIQUE,
    shards int NOT NULL,
    retention_ms bigint NOT NULL,
    max_payload int NOT NULL,
    created_at timestamptz NOT NULL DEFAULT clock_timestamp()
);

-- One row for each task. A task is open while finished_at and dead_at are null. A claim and a heartbeat must stay HOT updates, so no
-- index may mention what they change: status, token, locked_by, locked_until, deliveries, started_at, lost. Wide columns are last.
-- queue has no foreign key: its check would cost as much as the insert.
CREATE TABLE delayq.task (
    rev bigint NOT NULL,
    run_at timestamptz NOT NULL,
    created_at timestamptz NOT NULL,
    queue int NOT NULL,
    status delayq.status NOT NULL,
    failed int NOT NULL DEFAULT 0,
    lost int NOT NULL DEFAULT 0,
    deliveries int NOT NULL DEFAULT 0,
    max_failed int NOT NULL DEFAULT 0,
    max_lost int NOT NULL DEFAULT 0,
    cancel_requested boolean NOT NULL DEFAULT false,
    token uuid,
    locked_until timestamptz,
    started_at timestamptz,
    finished_at timestamptz,
    dead_at timestamptz,
    id bytea NOT NULL,
    type text NOT NULL,
    key text NOT NULL DEFAULT '',
    stamp bytea NOT NULL,
    locked_by text,
    reason text,
    last_error text,
    events jsonb,
    payload bytea NOT NULL,
    PRIMARY KEY (queue, id),
    CONSTRAINT task_id CHECK (octet_length(id) BETWEEN 1 AND 256),
    CONSTRAINT task_ended CHECK (
        (finished_at IS NOT NULL) = (status IN ('succeeded', 'cancelled')) AND (dead_at IS NOT NULL) = (status = 'dead')),
    CONSTRAINT task_running CHECK ((status = 'running') = (locked_until IS NOT NULL))
) WITH (
    fillfactor = 50,
    autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 1000,
    autovacuum_vacuum_insert_scale_factor = 0.05, autovacuum_analyze_scale_factor = 0.05, autovacuum_vacuum_cost_delay = 0,
    toast.autovacuum_vacuum_scale_factor = 0.02, toast.autovacuum_vacuum_threshold = 1000, toast.autovacuum_vacuum_cost_delay = 0
);

CREATE INDEX task_open ON delayq.task (queue, run_at, id) WHERE finished_at IS NULL AND dead_at IS NULL;
CREATE INDEX task_finished ON delayq.task (queue, finished_at) WHERE finished_at IS NOT NULL;
CREATE INDEX task_dead ON delayq.task (queue, dead_at, id) WHERE dead_at IS NOT NULL;

-- add_event appends to the history of a task and keeps its first entry and the last 50.
CREATE FUNCTION delayq.add_event(events jsonb, what text, consumer text, attempt int, reason text, error text) RETURNS jsonb
    LANGUAGE sql STABLE
    RETURN CASE WHEN jsonb_array_length(events) > 50 THEN events - 1 ELSE coalesce(events, '[]') END
        || jsonb_strip_nulls(jsonb_build_object(
            'at', clock_timestamp(), 'event', what, 'by', consumer, 'attempt', attempt, 'reason', reason, 'error', error));

-- The markers of Once.
CREATE TABLE delayq.once (
    hash bytea PRIMARY KEY, -- SHA-256 of the key, which may be long
    key bytea NOT NULL,
    created_at timestamptz NOT NULL,
    expires_at timestamptz NOT NULL
);
CREATE INDEX once_expires ON delayq.once (expires_at);

-- Where the reconciler stands.
CREATE TABLE delayq.reconcile (
    queue int PRIMARY KEY,
    state bytea NOT NULL,
    updated_at timestamptz NOT NULL
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 100);

-- For people.
CREATE VIEW delayq.tasks AS
    SELECT q.name AS queue, encode(t.id, 'escape') AS id, t.status, t.type, t.key, t.run_at, t.failed, t.lost, t.deliveries,
        t.locked_by, t.locked_until, t.cancel_requested, t.reason, t.last_error, t.created_at, t.started_at,
        coalesce(t.finished_at, t.dead_at) AS ended_at, t.rev, t.events, octet_length(t.payload) AS payload_bytes
    FROM delayq.task t JOIN delayq.queue q ON q.id = t.queue;
