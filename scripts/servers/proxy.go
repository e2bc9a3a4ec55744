package servers

import (
	"bytes"
	"net"
	"sync"
	"time"
)

// maxMatch bounds how long a match that spans two reads may be.
const maxMatch = 256

// A Proxy forwards TCP connections to a server and injects faults on demand.
// It is safe for concurrent use.
type Proxy struct {
	listener net.Listener
	target   string

	mu      sync.Mutex
	conns   map[net.Conn]struct{} // both ends of every forwarded connection
	closed  bool
	latency time.Duration
	hole    chan struct{} // non-nil while black-holed, closed when that ends
	fault   fault
	answer  []byte // what a reply contains that breaks the connection, nil = none
	hits    int
}

// A fault is what happens to the next request that contains match.
type fault struct {
	armed     bool
	match     []byte
	forward   bool // whether the server gets the request
	replyKeep int  // bytes of the reply that the client still gets
}

// StartProxy starts a proxy on a loopback port in front of target, a host:port.
func StartProxy(target string) (*Proxy, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	p := &Proxy{listener: l, target: target, conns: map[net.Conn]struct{}{}}
	go p.accept()
	return p, nil
}

// Addr is the address that clients connect to.
func (p *Proxy) Addr() string { return p.listener.Addr().String() }

// DropReply arms one fault: the next request that contains match reaches the
// server, which executes it, and the connection breaks instead of the reply.
// Match a command's name ("EVALSHA", in any case), so that the handshake of a
// fresh connection is not hit; "" matches any request.
func (p *Proxy) DropReply(match string) { p.CutReply(match, 0) }

// CutReply is DropReply that lets the first keep bytes of the reply pass: a
// pipeline cut in half.
func (p *Proxy) CutReply(match string, keep int) {
	p.arm(fault{armed: true, match: lower(match), forward: true, replyKeep: keep})
}

// DropRequest arms the opposite fault: the connection breaks before the
// request reaches the server. To the client both look the same.
func (p *Proxy) DropRequest(match string) { p.arm(fault{armed: true, match: lower(match)}) }

// DropAnswer arms a fault of its own: the connection breaks instead of the next
// reply that contains match, in any case. It is for what no request tells, such
// as the end of a PostgreSQL transaction: "COMMIT\x00". A match that begins in
// an earlier read has passed in part.
func (p *Proxy) DropAnswer(match string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.answer = lower(match)
}

func lower(s string) []byte { return bytes.ToLower([]byte(s)) }

func (p *Proxy) arm(f fault) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.fault = f
}

// Hits is how many armed faults have struck.
func (p *Proxy) Hits() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.hits
}

// SetLatency delays everything by d in each direction.
func (p *Proxy) SetLatency(d time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.latency = d
}

// BlackHole starts or ends a silence: connections stay and new ones are taken,
// but nothing passes. What was sent meanwhile arrives when the silence ends,
// as after a partition.
func (p *Proxy) BlackHole(on bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case on && p.hole == nil && !p.closed:
		p.hole = make(chan struct{})
	case !on && p.hole != nil:
		close(p.hole)
		p.hole = nil
	}
}

// CloseConns breaks every connection; new ones are taken.
func (p *Proxy) CloseConns() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for c := range p.conns {
		_ = c.Close()
	}
}

// Close ends the proxy and every connection through it.
func (p *Proxy) Close() {
	_ = p.listener.Close()
	p.mu.Lock()
	p.closed = true
	p.mu.Unlock()
	p.BlackHole(false)
	p.CloseConns()
}

func (p *Proxy) accept() {
	for {
		client, err := p.listener.Accept()
		if err != nil {
			return // closed
		}
		go p.serve(client)
	}
}

func (p *Proxy) serve(client net.Conn) {
	defer client.Close()
	server, err := net.Dial("tcp", p.target)
	if err != nil {
		return // the client sees a broken connection, as from a dead server
	}
	defer server.Close()
	if !p.track(client, server) {
		return
	}
	defer p.untrack(client, server)

	cut := make(chan int, 1) // how much of the next reply passes before the end
	go func() {
		defer client.Close() // unblocks the other direction, whichever ends first
		defer server.Close()
		p.replies(client, server, cut)
	}()
	p.requests(server, client, cut)
}

// requests forwards what the client sends, until the connection or an armed
// fault ends it.
func (p *Proxy) requests(server, client net.Conn, cut chan<- int) {
	var passed []byte // the end of what went before, as a match may span two reads
	buf := make([]byte, 64<<10)
	for {
		n, err := client.Read(buf)
		if n > 0 {
			f, hit := p.strike(passed, buf[:n])
			if hit && !f.forward {
				return
			}
			if hit {
				select {
				case cut <- f.replyKeep:
				default: // the connection already waits for its end
				}
			}
			passed = end(append(passed, end(buf[:n], maxMatch)...), maxMatch)
			p.delay()
			if _, err := server.Write(buf[:n]); err != nil {
				return
			}
		}
		if err != nil {
			return
		}
	}
}

// replies forwards what the server sends; after a cut only so much of it.
func (p *Proxy) replies(client, server net.Conn, cut <-chan int) {
	keep := -1        // unlimited
	var passed []byte // as in requests
	buf := make([]byte, 64<<10)
	for keep != 0 {
		n, err := server.Read(buf)
		if n > 0 {
			if p.strikeAnswer(passed, buf[:n]) {
				return
			}
			passed = end(append(passed, end(buf[:n], maxMatch)...), maxMatch)
			p.delay()
			select {
			case keep = <-cut: // these are the first bytes of the faulted reply
			default:
			}
			if keep >= 0 {
				n = min(n, keep)
				keep -= n
			}
			if _, err := client.Write(buf[:n]); err != nil {
				return
			}
		}
		if err != nil {
			return
		}
	}
}

// strike takes the armed fault if the request matches it. A match that lies in
// passed alone is an old request and does not count.
func (p *Proxy) strike(passed, request []byte) (fault, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	f := p.fault
	if !f.armed {
		return fault{}, false
	}
	if !contains(passed, request, f.match) {
		return fault{}, false
	}
	p.fault = fault{}
	p.hits++
	return f, true
}

// strikeAnswer is strike for a reply.
func (p *Proxy) strikeAnswer(passed, reply []byte) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.answer == nil || !contains(passed, reply, p.answer) {
		return false
	}
	p.answer = nil
	p.hits++
	return true
}

func contains(passed, data, match []byte) bool {
	window := append(bytes.Clone(end(passed, len(match)-1)), data...)
	return bytes.Contains(bytes.ToLower(window), match)
}

// end is the last n bytes of b.
func end(b []byte, n int) []byte { return b[max(0, len(b)-max(0, n)):] }

func (p *Proxy) delay() {
	p.mu.Lock()
	d, hole := p.latency, p.hole
	p.mu.Unlock()
	if d > 0 {
		time.Sleep(d)
	}
	if hole != nil {
		<-hole
	}
}

func (p *Proxy) track(conns ...net.Conn) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range conns {
		p.conns[c] = struct{}{}
	}
	return !p.closed
}

func (p *Proxy) untrack(conns ...net.Conn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range conns {
		delete(p.conns, c)
	}
}
