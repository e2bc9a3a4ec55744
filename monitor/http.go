package monitor

import (
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"net/http"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// Handler answers a scrape with the metrics of the Collector, and of more if given. It answers before the scraper gives up, as told
// by its header X-Prometheus-Scrape-Timeout-Seconds: what has not been read by then is a scrape error.
func (m *Monitor) Handler(more ...prometheus.Gatherer) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		ctx, cancel := withinScrape(r)
		defer cancel()
		reg := prometheus.NewRegistry()
		reg.MustRegister(&collector{m, ctx})
		all := append(prometheus.Gatherers{reg}, more...)
		promhttp.HandlerFor(all, promhttp.HandlerOpts{}).ServeHTTP(w, r)
	})
}

// SameToken compares tokens for who guards the Handler. It takes the same time whatever the two have in common, their lengths too.
func SameToken(got, want string) bool {
	a, b := sha256.Sum256([]byte(got)), sha256.Sum256([]byte(want))
	return subtle.ConstantTimeCompare(a[:], b[:]) == 1
}

const (
	scrapeTimeoutHeader = "X-Prometheus-Scrape-Timeout-Seconds"
	// scrapeMargin is for the answer to get there.
	scrapeMargin = 500 * time.Millisecond
)

func withinScrape(r *http.Request) (context.Context, context.CancelFunc) {
	seconds, err := strconv.ParseFloat(r.Header.Get(scrapeTimeoutHeader), 64)
	if err != nil || !(seconds > 0 && seconds < 3600) {
		return r.Context(), func() {}
	}
	left := time.Duration(seconds * float64(time.Second))
	return context.WithTimeout(r.Context(), max(left-scrapeMargin, left/2))
}
