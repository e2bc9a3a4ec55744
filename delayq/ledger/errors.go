package ledger

import (
	"errors"
	"strings"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/delayq/toolkit/delayq"
)

// Errors of Open to branch on with errors.Is, beside delayq.ErrSchema and delayq.ErrServerVersion.
var (
	// ErrRights: the database user lacks a right that the ledger needs; the text names the object and the right.
	ErrRights = errors.New("missing rights in the database")
	// ErrStandby: the database is a standby, which cannot be written.
	ErrStandby = errors.New("the database is a standby")
)

func wrap(verb, queue string, err error) error {
	if err == nil {
		return nil
	}
	return &delayq.LedgerError{Op: verb + " " + queue, Err: err}
}

// again reports whether PostgreSQL undid a statement for the sake of another, so that it can be sent once more.
func again(err error) bool {
	var pg *pgconn.PgError
	return errors.As(err, &pg) && (pg.Code == "40001" || pg.Code == "40P01") // serialization failure, deadlock
}

// isLocked reports whether a statement gave up waiting for a row that another transaction has locked.
func isLocked(err error) bool {
	var pg *pgconn.PgError
	return errors.As(err, &pg) && pg.Code == "55P03"
}

// clean makes text of a handler fit for a text column: valid UTF-8 without NUL, at most 1 KiB.
func clean(s string) string {
	s = strings.ReplaceAll(strings.ToValidUTF8(s, "\uFFFD"), "\x00", "\uFFFD")
	if len(s) > 1024 {
		s = strings.ToValidUTF8(s[:1024], "")
	}
	return s
}
