package servers

import (
	"context"
	"net"
	"strconv"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/redis/go-redis/v9"
)

// throughProxy returns a warm client behind a proxy and one beside it.
func throughProxy(t *testing.T) (p *Proxy, via, direct *redis.Client) {
	r := SharedRedis(t)
	p = NewProxy(t, r.Addr())
	via, direct = client(t, p.Addr()), client(t, r.Addr())
	if err := via.Ping(t.Context()).Err(); err != nil {
		t.Fatal(err)
	}
	return p, via, direct
}

const incr = "return redis.call('INCR', KEYS[1])"

func TestProxyDropsAReplyAfterTheServerExecuted(t *testing.T) {
	t.Parallel()
	p, via, direct := throughProxy(t)
	key := QueueName(t)
	p.DropReply("EVAL")
	if err := via.Ping(t.Context()).Err(); err != nil {
		t.Errorf("a request that does not match: %v", err)
	}
	if err := via.Eval(t.Context(), incr, []string{key}).Err(); err == nil {
		t.Error("the reply came")
	}
	if n, err := direct.Get(t.Context(), key).Int(); n != 1 {
		t.Errorf("executed %d times, %v", n, err)
	}
	if n, err := via.Eval(t.Context(), incr, []string{key}).Int(); n != 2 || err != nil {
		t.Errorf("the next call: %d, %v", n, err)
	}
	if p.Hits() != 1 {
		t.Errorf("%d hits", p.Hits())
	}
}

func TestProxyIgnoresRequestsFromBeforeTheArming(t *testing.T) {
	t.Parallel()
	p, via, _ := throughProxy(t)
	if err := via.Echo(t.Context(), "old").Err(); err != nil {
		t.Fatal(err)
	}
	p.DropReply("old")
	if err := via.Ping(t.Context()).Err(); err != nil || p.Hits() != 0 {
		t.Errorf("%v, %d hits", err, p.Hits())
	}
}

func TestProxyDropsARequest(t *testing.T) {
	t.Parallel()
	p, via, direct := throughProxy(t)
	key := QueueName(t)
	p.DropRequest("incr")
	if err := via.Incr(t.Context(), key).Err(); err == nil {
		t.Error("a reply came")
	}
	if n := direct.Exists(t.Context(), key).Val(); n != 0 {
		t.Error("the server got the request")
	}
}

func TestProxyCutsAPipelineInHalf(t *testing.T) {
	t.Parallel()
	p, via, direct := throughProxy(t)
	key := QueueName(t)
	p.CutReply("incr", len(":1\r\n"))
	pipe := via.Pipeline()
	first, second := pipe.Incr(t.Context(), key), pipe.Incr(t.Context(), key)
	if _, err := pipe.Exec(t.Context()); err == nil {
		t.Error("no error")
	}
	// The client gives both the error, but has read the first reply.
	if first.Val() != 1 || second.Val() != 0 {
		t.Errorf("first %v, second %v", first, second)
	}
	if n, err := direct.Get(t.Context(), key).Int(); n != 2 {
		t.Errorf("executed %d of 2, %v", n, err)
	}
}

func TestProxyBlackHoleHoldsWhatIsSent(t *testing.T) {
	t.Parallel()
	p, via, direct := throughProxy(t)
	key := QueueName(t)
	p.BlackHole(true)
	done := make(chan error, 1)
	go func() { done <- via.Incr(t.Context(), key).Err() }()
	select {
	case err := <-done:
		t.Fatalf("answered through a black hole: %v", err)
	case <-time.After(50 * time.Millisecond):
	}
	if n := direct.Exists(t.Context(), key).Val(); n != 0 {
		t.Error("the server got the request")
	}
	p.BlackHole(false)
	if err := <-done; err != nil {
		t.Error(err)
	}
}

func TestProxyLatency(t *testing.T) {
	t.Parallel()
	p, via, _ := throughProxy(t)
	p.SetLatency(20 * time.Millisecond)
	start := time.Now()
	if err := via.Ping(t.Context()).Err(); err != nil {
		t.Error(err)
	}
	if d := time.Since(start); d < 40*time.Millisecond {
		t.Errorf("answered after %s", d)
	}
}

func TestProxyClosesConnections(t *testing.T) {
	t.Parallel()
	p, via, _ := throughProxy(t)
	p.CloseConns()
	_ = via.Ping(t.Context()) // the pool's stale connection
	if err := via.Ping(t.Context()).Err(); err != nil {
		t.Errorf("a new connection: %v", err)
	}
	p.Close()
	if err := ping(t, p.Addr(), time.Second); err == nil {
		t.Error("answers after Close")
	}
}

// pgThroughProxy returns a PostgreSQL connection behind a proxy, with a
// transaction that has inserted a row into t, and a count of t's rows beside it.
func pgThroughProxy(t *testing.T) (p *Proxy, conn *pgx.Conn, tx pgx.Tx, rows func() int) {
	url := NewDatabase(t)
	p = NewProxy(t, SharedPostgres(t).Addr())
	cfg, err := pgx.ParseConfig(url)
	if err != nil {
		t.Fatal(err)
	}
	host, port, err := net.SplitHostPort(p.Addr())
	if err != nil {
		t.Fatal(err)
	}
	n, err := strconv.ParseUint(port, 10, 16)
	if err != nil {
		t.Fatal(err)
	}
	cfg.Host, cfg.Port = host, uint16(n)
	conn, err = pgx.ConnectConfig(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close(context.Background()) })
	if _, err := conn.Exec(t.Context(), "create table t (n int)"); err != nil {
		t.Fatal(err)
	}
	if tx, err = conn.Begin(t.Context()); err == nil {
		_, err = tx.Exec(t.Context(), "insert into t values (1)")
	}
	if err != nil {
		t.Fatal(err)
	}
	return p, conn, tx, func() int { return query(t, url, "select count(*) from t") }
}

func TestProxyLosesTheEndOfATransaction(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		arm  func(*Proxy)
		rows int
	}{
		"its reply, by the request": {func(p *Proxy) { p.DropReply("commit") }, 1},
		"its reply":                 {func(p *Proxy) { p.DropAnswer("COMMIT\x00") }, 1},
		"its request":               {func(p *Proxy) { p.DropRequest("commit") }, 0},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p, conn, tx, rows := pgThroughProxy(t)
			test.arm(p)
			if _, err := tx.Exec(t.Context(), "select 1"); err != nil {
				t.Fatalf("what does not match: %v", err)
			}
			if err := tx.Commit(t.Context()); err == nil {
				t.Error("the commit was answered")
			}
			if !conn.IsClosed() {
				t.Error("the connection lives")
			}
			if n := rows(); n != test.rows || p.Hits() != 1 {
				t.Errorf("%d rows, want %d; %d hits", n, test.rows, p.Hits())
			}
		})
	}
}

func TestProxyHoldsAndBreaksPostgres(t *testing.T) {
	t.Parallel()
	p, conn, tx, rows := pgThroughProxy(t)
	p.BlackHole(true)
	done := make(chan error, 1)
	go func() { done <- tx.Commit(t.Context()) }()
	select {
	case err := <-done:
		t.Fatalf("answered through a black hole: %v", err)
	case <-time.After(50 * time.Millisecond):
	}
	if n := rows(); n != 0 {
		t.Error("the server got the commit")
	}
	p.BlackHole(false)
	if err := <-done; err != nil {
		t.Error(err)
	}
	if n := rows(); n != 1 {
		t.Errorf("%d rows", n)
	}
	p.CloseConns()
	if err := conn.Ping(t.Context()); err == nil {
		t.Error("the connection lives")
	}
}
