package console

import (
	"context"
	"errors"
	"net"
	"net/http"

	"github.com/redis/go-redis/v9"

	"github.com/delayq/toolkit/delayq"
)

// A refusal is an answer other than the page that was asked for. Its text is in the catalogue.
type refusal struct {
	key    string
	status int
}

func (e *refusal) Error() string { return "console: " + e.key }

var (
	errNoPage     = &refusal{"no_page", http.StatusNotFound}
	errNoTask     = &refusal{"no_task", http.StatusNotFound}
	errNoQueue    = &refusal{"no_queue", http.StatusNotFound}
	errCrossSite  = &refusal{"cross_site", http.StatusForbidden}
	errHost       = &refusal{"host", http.StatusMisdirectedRequest}
	errNotLocal   = &refusal{"not_local", http.StatusForbidden}
	errNoUser     = &refusal{"no_user", http.StatusForbidden}
	errReadOnly   = &refusal{"read_only", http.StatusForbidden}
	errNoSession  = &refusal{"session", http.StatusUnauthorized}
	errBadToken   = &refusal{"bad_token", http.StatusUnauthorized}
	errTooMany    = &refusal{"too_many", http.StatusTooManyRequests}
	errBadForm    = &refusal{"bad_form", http.StatusBadRequest}
	errBadCursor  = &refusal{"bad_cursor", http.StatusBadRequest}
	errTooMuch    = &refusal{"too_much", http.StatusBadRequest}
	errNothing    = &refusal{"nothing", http.StatusBadRequest}
	errOneTime    = &refusal{"one_time", http.StatusBadRequest}
	errBadTime    = &refusal{"bad_time", http.StatusBadRequest}
	errExpired    = &refusal{"expired", http.StatusConflict}
	errRedis      = &refusal{"redis", http.StatusServiceUnavailable}
	errDatabase   = &refusal{"database", http.StatusServiceUnavailable}
	errServers    = &refusal{"servers", http.StatusServiceUnavailable}
	errQueueWrong = &refusal{"queue_wrong", http.StatusServiceUnavailable}
)

// asRefusal says what a page shows of an error. The error's own text stays in the log: it may name hosts.
func asRefusal(err error) *refusal {
	if many, ok := any(err).(interface{ Unwrap() []error }); ok { // of a look: the first is Redis', without which there is nothing
		err = many.Unwrap()[0]
	}
	var r *refusal
	var input *delayq.InputError
	var led *delayq.LedgerError
	var reply redis.Error
	var network net.Error
	switch {
	case errors.As(err, &r):
		return r
	case errors.Is(err, delayq.ErrNotFound):
		return errNoTask
	case errors.Is(err, delayq.ErrNoQueue):
		return errNoQueue
	case errors.As(err, &input) && input.Field == "ListOptions.Cursor":
		return errBadCursor
	case errors.As(err, &input) && input.Field == "queue name":
		return errNoQueue
	case errors.Is(err, delayq.ErrInvalid):
		return errBadForm
	case errors.Is(err, delayq.ErrLedger), errors.Is(err, delayq.ErrShards), errors.Is(err, delayq.ErrSchema), errors.Is(err, delayq.ErrEviction),
		errors.Is(err, delayq.ErrServerVersion), errors.Is(err, delayq.ErrClockSkew):
		return errQueueWrong
	case errors.As(err, &led): // before Redis' own: both fail as networks do
		return errDatabase
	case errors.As(err, &reply), errors.As(err, &network), errors.Is(err, context.DeadlineExceeded), errors.Is(err, redis.ErrClosed):
		return errRedis
	}
	return errServers
}

type errorData struct {
	Key    string
	Status int
	Retry  bool // the page tries again by itself
}

// fail answers with what went wrong, in words, and nothing of the inside.
func (c *Console) fail(w http.ResponseWriter, r *http.Request, err error) {
	if r.Context().Err() != nil { // nobody is there any more
		return
	}
	how := asRefusal(err)
	if how.status >= 500 {
		c.log.Warn("console: a page could not be made", "path", r.URL.EscapedPath(), "error", err)
	}
	if how.status == http.StatusUnauthorized {
		w.Header().Set("WWW-Authenticate", `Bearer realm="delayq console"`)
	}
	d := errorData{how.key, how.status, how.status == http.StatusServiceUnavailable && r.Method == http.MethodGet}
	c.show(w, r, how.status, "error", text("error."+how.key+".title"), d)
}
