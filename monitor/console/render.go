package console

import (
	"bytes"
	"embed"
	"fmt"
	"html/template"
	"net/http"
	"strconv"
	"strings"
	"time"
)

//go:embed templates/*.html
var templates embed.FS

// pages are the templates by the name of their page.
var pages = func() map[string]*template.Template {
	all := map[string]*template.Template{}
	base := template.Must(template.New("").Funcs(functions).ParseFS(templates, "templates/layout.html", "templates/parts.html"))
	for _, name := range []string{"overview", "queue", "task", "dead", "deadqueues", "search", "confirm", "login", "error"} {
		all[name] = template.Must(template.Must(base.Clone()).ParseFS(templates, "templates/"+name+".html"))
	}
	return all
}()

var functions = template.FuncMap{
	"t": text,
	"n": func(key string, n any, args ...any) (string, error) {
		switch n := n.(type) {
		case int:
			return count(key, n, args...), nil
		case int64:
			return count(key, n, args...), nil
		}
		return "", fmt.Errorf("n %s: %T is not a number", key, n)
	},
	"num": func(n any) (string, error) {
		switch n := n.(type) {
		case int:
			return number(n), nil
		case int64:
			return number(n), nil
		}
		return "", fmt.Errorf("num: %T is not a number", n)
	},
	"asset": asset, "seg": segment, "shown": shown, "readable": readable, "rate": rate, "span": span, "quantile": quantile, "bytes": bytesOf,
	"iso":     func(t time.Time) string { return t.UTC().Format("2006-01-02T15:04:05.000Z") },
	"utc":     func(t time.Time) string { return t.UTC().Format("2006-01-02 15:04:05") + " UTC" },
	"ago":     func(t time.Time) string { return ago(time.Until(t)) },
	"spark":   spark,
	"spoken":  spoken,
	"queue":   func(name string) string { return "/queue/" + segment(name) },
	"dead":    func(name string) string { return "/queue/" + segment(name) + "/dead" },
	"taskurl": func(queue, id string) string { return "/queue/" + segment(queue) + "/task/" + segment(id) },
	"reason":  func(name string) string { return named("reason.", name) },
	"event":   func(name string) string { return named("event.", name) },
	"percent": func(v float64) float64 { return v * 100 },
	"dict":    dict,
}

// named is the text of a name from a set that may grow.
func named(prefix, name string) string {
	if _, known := catalogue[prefix+name]; known {
		return text(prefix + name)
	}
	return shown(name)
}

// dict gives a template several arguments.
func dict(pairs ...any) (map[string]any, error) {
	m := map[string]any{}
	for i := 0; i+1 < len(pairs); i += 2 {
		key, ok := pairs[i].(string)
		if !ok {
			return nil, fmt.Errorf("dict: %v is not a name", pairs[i])
		}
		m[key] = pairs[i+1]
	}
	return m, nil
}

// spark is the line of a small chart of 100 by 24.
func spark(values []int64) string {
	if len(values) < 2 {
		return ""
	}
	const most = 50 // points; a line of more is no finer on a screen
	var top int64 = 1
	for _, v := range values {
		top = max(top, v)
	}
	step := max(1, len(values)/most)
	var b strings.Builder
	for i := 0; i < len(values); i += step {
		x := float64(i) / float64(len(values)-1) * 100
		y := 23 - float64(values[i])/float64(top)*22
		b.WriteString(strconv.FormatFloat(x, 'f', 1, 64) + "," + strconv.FormatFloat(y, 'f', 1, 64) + " ")
	}
	return b.String()
}

// A sheet is what the layout needs.
type sheet struct {
	Name, Title string
	Path        string // of this page, for what asks for it again
	User        string
	Logout      bool
	ReadOnly    bool
	Payloads    bool
	Search      string
	Notice      *notice
	Data        any
}

// show answers with a page. It is made in full before its first byte is sent.
func (c *Console) show(w http.ResponseWriter, r *http.Request, status int, name, title string, data any) {
	p := sheet{
		Name: name, Title: title, Path: r.URL.RequestURI(), User: userOf(r), ReadOnly: c.cfg.ReadOnly, Payloads: c.cfg.ShowPayloads,
		Search: r.URL.Query().Get("find"), Notice: c.noticeOf(r), Data: data,
	}
	p.Logout = p.User != "" && c.cfg.Token != "" && r.Header.Get("Authorization") == "" && p.User == "token"
	var b bytes.Buffer
	layout := "page"
	if r.Header.Get("HX-Request") != "" { // it replaces a part of the page
		layout = "main"
	}
	if err := pages[name].ExecuteTemplate(&b, layout, p); err != nil {
		c.log.Error("console: template", "page", name, "error", err)
		http.Error(w, text("error.template"), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "text/html; charset=utf-8")
	w.WriteHeader(status)
	_, _ = w.Write(b.Bytes())
}

// live reports whether a script asks for the part of a page that changes.
func live(r *http.Request) bool { return r.Header.Get("HX-Request") != "" }

// A status is a word for how something is, and how urgent that is: "ok", "warn", "bad", or "idle".
type status struct{ Level, Text string }

const lateFrom = time.Minute

// ageLevel is the level of the age of the oldest due task.
func ageLevel(d time.Duration) string {
	switch {
	case d >= 5*lateFrom:
		return "bad"
	case d >= lateFrom:
		return "warn"
	}
	return ""
}
