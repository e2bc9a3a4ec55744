package console

import (
	"context"
	"errors"
	"net/http"
	"strconv"
	"strings"
	"sync"

	"github.com/delayq/toolkit/delayq"
)

type searchData struct {
	Find, ID string
	Queue    bool // there is a queue of that name
	Found    []delayq.Info
	Silent   []string // queues that could not be asked
	Looked   int
	Listed   bool // all queues are known
}

// search looks an id up in all queues, each with one call. Ids are exact: there is no index of parts of them.
func (c *Console) search(w http.ResponseWriter, r *http.Request) {
	d := searchData{Find: r.URL.Query().Get("find"), Listed: true}
	d.ID = typedID(d.Find)
	if d.ID == "" || len(d.ID) > 256 {
		c.show(w, r, http.StatusOK, "search", text("search.title"), d)
		return
	}
	ctx, cancel := context.WithTimeout(r.Context(), patience)
	defer cancel()
	view, err := c.views.now(ctx)
	if err == nil {
		err = blind(view)
	}
	if err != nil {
		c.fail(w, r, err)
		return
	}
	found := make([]*delayq.Info, len(view.Queues))
	silent := make([]bool, len(view.Queues))
	slots := make(chan struct{}, 8)
	var all sync.WaitGroup
	for i := range view.Queues {
		if silent[i] = view.Queues[i].RedisOnly; silent[i] { // its ledger would have to tell
			continue
		}
		all.Go(func() {
			slots <- struct{}{}
			defer func() { <-slots }()
			q, err := c.m.Queue(ctx, view.Queues[i].Name)
			if err == nil {
				found[i], err = q.Get(ctx, d.ID)
			}
			silent[i] = err != nil && !errors.Is(err, delayq.ErrNotFound) && !errors.Is(err, delayq.ErrNoQueue)
		})
	}
	all.Wait()
	for i := range view.Queues {
		name := view.Queues[i].Name
		d.Queue = d.Queue || name == d.ID
		switch {
		case silent[i]:
			d.Silent = append(d.Silent, name)
		case found[i] != nil:
			d.Found = append(d.Found, *found[i])
		}
	}
	d.Looked, d.Listed = len(view.Queues)-len(d.Silent), view.Listed
	if len(d.Found) == 1 && len(d.Silent) == 0 && d.Listed && !d.Queue {
		http.Redirect(w, r, "/queue/"+segment(d.Found[0].Queue)+"/task/"+segment(d.ID), http.StatusSeeOther)
		return
	}
	c.show(w, r, http.StatusOK, "search", text("search.title"), d)
}

// typedID is the id that somebody has typed: as it is, or in quotes as pages show ids that cannot be typed.
func typedID(s string) string {
	if len(s) > 1 && s[0] == '"' {
		if id, err := strconv.Unquote(s); err == nil {
			return id
		}
	}
	return strings.TrimSpace(s)
}
