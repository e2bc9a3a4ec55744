package functions

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"net/http"
	"strings"

	"github.com/aws/aws-lambda-go/events"
)

// urlRequest is the request that an event of a function URL, or of an HTTP API of version 2, brings, or nil for any other event.
func urlRequest(ctx context.Context, event json.RawMessage) (*http.Request, error) {
	var e events.LambdaFunctionURLRequest
	// What is no object, or has a member of another type by one of these names, is another service's event.
	if err := json.Unmarshal(event, &e); err != nil || e.RequestContext.HTTP.Method == "" {
		return nil, nil
	}
	r, err := http.NewRequestWithContext(ctx, e.RequestContext.HTTP.Method, "https://function"+path(e.RawPath), http.NoBody)
	if err != nil {
		return nil, err
	}
	r.URL.RawQuery = e.RawQueryString
	r.RemoteAddr = e.RequestContext.HTTP.SourceIP
	for name, value := range e.Headers {
		r.Header.Set(name, value)
	}
	return r, nil
}

// path keeps what a caller sends from becoming a part of the host.
func path(raw string) string { return "/" + strings.TrimLeft(raw, "/") }

// urlAnswer has handler answer r, in the form that Lambda makes a response of.
func urlAnswer(handler http.Handler, r *http.Request) events.LambdaFunctionURLResponse {
	w := &urlWriter{header: http.Header{}}
	handler.ServeHTTP(w, r)
	w.WriteHeader(http.StatusOK)
	a := events.LambdaFunctionURLResponse{StatusCode: w.status, Headers: map[string]string{}}
	for name, values := range w.sent {
		a.Headers[name] = strings.Join(values, ", ")
	}
	switch {
	case r.Method == http.MethodHead:
	case w.sent.Get("Content-Encoding") != "": // JSON is text
		a.Body, a.IsBase64Encoded = base64.StdEncoding.EncodeToString(w.body.Bytes()), true
	default:
		a.Body = w.body.String()
	}
	return a
}

// A urlWriter keeps a whole response.
type urlWriter struct {
	header, sent http.Header
	status       int
	body         bytes.Buffer
}

func (w *urlWriter) Header() http.Header { return w.header }

func (w *urlWriter) WriteHeader(status int) {
	if w.status == 0 {
		w.status, w.sent = status, w.header.Clone()
	}
}

func (w *urlWriter) Write(p []byte) (int, error) {
	w.WriteHeader(http.StatusOK)
	return w.body.Write(p)
}
