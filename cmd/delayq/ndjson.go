package main

import (
	"bufio"
	"bytes"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/delayq/toolkit/delayq"
)

// maxLine is the longest line of a task file: the greatest payload (256 KiB) in base64 or with every byte escaped,
// and room to spare.
const maxLine = 2 << 20

// lines reads a task file line by line and never holds more than one line of it.
type lines struct {
	r *bufio.Reader
	n int // the number of the line last returned
}

func newLines(r io.Reader) *lines { return &lines{r: bufio.NewReaderSize(r, maxLine)} }

// lineError is what is wrong with one line; the lines after it are read all the same.
type lineError struct{ msg string }

func (e *lineError) Error() string { return e.msg }

// next returns the next task. A *lineError concerns this line alone, io.EOF is the end.
func (l *lines) next() (delayq.Task, error) {
	for {
		line, err := l.r.ReadSlice('\n')
		l.n++
		if errors.Is(err, bufio.ErrBufferFull) {
			if err := l.skipRest(); err != nil {
				return delayq.Task{}, err
			}
			return delayq.Task{}, &lineError{fmt.Sprintf("longer than %d bytes", maxLine)}
		}
		if err != nil && (!errors.Is(err, io.EOF) || len(line) == 0) {
			return delayq.Task{}, err
		}
		if l.n == 1 {
			line = bytes.TrimPrefix(line, []byte("\uFEFF")) // editors on Windows put it there
		}
		if line = bytes.TrimSpace(line); len(line) > 0 {
			return parseTask(line)
		}
	}
}

// idle tells that the next line has not been read yet and may be long in coming, as from a pipe.
func (l *lines) idle() bool { return l.r.Buffered() == 0 }

func (l *lines) skipRest() error {
	for {
		switch _, err := l.r.ReadSlice('\n'); {
		case err == nil, errors.Is(err, io.EOF):
			return nil // the next read finds the end of the file again
		case !errors.Is(err, bufio.ErrBufferFull):
			return err
		}
	}
}

// record is one line of a task file.
type record struct {
	ID            string           `json:"id"`
	Type          string           `json:"type"`
	Key           string           `json:"key"`
	RunAt         *string          `json:"run_at"`
	Delay         *json.RawMessage `json:"delay"`
	Payload       json.RawMessage  `json:"payload"`
	PayloadBase64 *string          `json:"payload_base64"`
}

// parseTask reads one line. Its errors name the field and never quote the line: payloads may be personal data.
func parseTask(line []byte) (delayq.Task, error) {
	if !utf8.Valid(line) {
		return delayq.Task{}, &lineError{"not UTF-8 text; give other bytes as payload_base64"}
	}
	var r record
	dec := json.NewDecoder(bytes.NewReader(line))
	dec.DisallowUnknownFields() // a misspelt "delay" would run the task at once
	if err := dec.Decode(&r); err != nil {
		return delayq.Task{}, &lineError{jsonMessage(err)}
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return delayq.Task{}, &lineError{"more than one JSON value on the line"}
	}
	t := delayq.Task{ID: r.ID, Type: r.Type, Key: r.Key}
	var err error
	if t.RunAt, t.Delay, err = r.when(); err != nil {
		return delayq.Task{}, err
	}
	if t.Payload, err = r.payload(); err != nil {
		return delayq.Task{}, err
	}
	return t, nil
}

func (r *record) when() (at time.Time, delay time.Duration, err error) {
	switch {
	case r.RunAt != nil && r.Delay != nil:
		return at, 0, &lineError{"run_at and delay: give one of them"}
	case r.RunAt != nil:
		if at, err = time.Parse(time.RFC3339, *r.RunAt); err != nil {
			return at, 0, &lineError{"run_at: want RFC 3339 such as 2030-01-02T15:04:05Z"}
		}
	case r.Delay != nil:
		if delay, err = parseDelay(*r.Delay); err != nil {
			return at, 0, err
		}
	}
	return at, delay, nil
}

// parseDelay reads a Go duration in quotes, or a number of seconds.
func parseDelay(raw json.RawMessage) (time.Duration, error) {
	bad := &lineError{`delay: want a duration in quotes such as "90s" or "30m", or a number of seconds`}
	var text string
	if json.Unmarshal(raw, &text) == nil && raw[0] == '"' {
		d, err := time.ParseDuration(text)
		if err != nil {
			return 0, bad
		}
		return d, nil
	}
	// The number goes through ParseDuration too: it is exact and knows the limits, a float would be neither.
	if strings.IndexFunc(string(raw), func(c rune) bool { return !strings.ContainsRune("-.0123456789", c) }) >= 0 {
		return 0, bad
	}
	d, err := time.ParseDuration(string(raw) + "s")
	if err != nil {
		return 0, bad
	}
	return d, nil
}

func (r *record) payload() ([]byte, error) {
	switch {
	case r.Payload != nil && r.PayloadBase64 != nil:
		return nil, &lineError{"payload and payload_base64: give one of them"}
	case r.PayloadBase64 != nil:
		b, err := base64.StdEncoding.DecodeString(*r.PayloadBase64)
		if err != nil {
			return nil, &lineError{"payload_base64: not standard base64"}
		}
		return b, nil
	}
	return r.Payload, nil
}

// jsonMessage says what encoding/json found, without the values it found.
func jsonMessage(err error) string {
	var wrongType *json.UnmarshalTypeError
	var syntax *json.SyntaxError
	switch {
	case errors.As(err, &wrongType) && wrongType.Field == "":
		return "want a JSON object"
	case errors.As(err, &wrongType):
		return fmt.Sprintf("%s: want a %s", wrongType.Field, wrongType.Type)
	case errors.As(err, &syntax):
		return fmt.Sprintf("not JSON: wrong at byte %d", syntax.Offset)
	case errors.Is(err, io.ErrUnexpectedEOF):
		return "not JSON: the line ends too soon"
	}
	return strings.TrimPrefix(err.Error(), "json: ") + "; a line has id, type, key, run_at or delay, payload or payload_base64"
}
