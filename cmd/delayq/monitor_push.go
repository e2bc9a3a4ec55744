package main

import (
	"context"
	"log/slog"
	"net/http"
	"net/url"
	"os"
	"time"

	"github.com/prometheus/client_golang/prometheus/push"
	"github.com/spf13/cobra"
)

// pushVar keeps a password in the URL out of ps.
const pushVar = "DELAYQ_MONITOR_PUSH_URL"

// pushTimeout bounds a push, the look included.
const pushTimeout = 20 * time.Second

// pusher pushes the metrics to a Pushgateway.
type pusher struct {
	url   string
	job   string
	every time.Duration
}

func (p *pusher) flags(cmd *cobra.Command) {
	cmd.Flags().StringVar(&p.url, "push", "", "push the metrics to the Pushgateway at this `URL` too; default $"+pushVar)
	cmd.Flags().StringVar(&p.job, "push-job", "delayq", "the label job of what is pushed")
	cmd.Flags().DurationVar(&p.every, "push-every", 30*time.Second, "from one push to the next")
}

// open returns nil where nothing is to be pushed. User and password leave the URL, since errors quote it.
func (p *pusher) open() (*push.Pusher, error) {
	if p.url == "" {
		p.url = os.Getenv(pushVar)
	}
	if p.url == "" {
		return nil, nil
	}
	u, err := url.Parse(p.url)
	if err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https" {
		return nil, usagef("--push: not a URL of a Pushgateway; want http://host:port or https://")
	}
	if p.every < time.Second {
		return nil, usagef("--push-every: want at least 1s")
	}
	if p.job == "" {
		return nil, usagef("--push-job: want a name")
	}
	user := u.User
	u.User = nil
	to := push.New(u.String(), p.job).Client(&http.Client{Timeout: pushTimeout})
	if user != nil {
		password, _ := user.Password()
		to = to.BasicAuth(user.Username(), password)
	}
	return to, nil
}

func (p *pusher) run(ctx context.Context, to *push.Pusher, log *slog.Logger) {
	for {
		next := time.Now().Add(p.every)
		pushing, cancel := context.WithTimeout(ctx, pushTimeout)
		if err := to.PushContext(pushing); err != nil && ctx.Err() == nil {
			log.Error("delayq monitor: push failed, trying again", "error", err.Error())
		}
		cancel()
		if !sleep(ctx, time.Until(next)) {
			return
		}
	}
}
