package console

import (
	"encoding/base64"
	"encoding/json"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strings"
)

// A notice tells on the next page what has become of a change. It travels in the address, signed, so that no link can make one up.
type notice struct {
	Do     string
	OK     int
	Failed map[string]int
	More   bool
}

// Lines are its sentences.
func (n *notice) Lines() []string {
	var lines []string
	if n.OK > 0 || len(n.Failed) == 0 {
		lines = append(lines, count("done."+n.Do, n.OK))
	}
	for _, why := range slices.Sorted(maps.Keys(n.Failed)) {
		lines = append(lines, count("failed", n.Failed[why], text("why."+why)))
	}
	if n.More {
		lines = append(lines, text("done.more"))
	}
	return lines
}

// Level is how it went.
func (n *notice) Level() string {
	if len(n.Failed) > 0 {
		return "bad"
	}
	return "ok"
}

func (c *Console) withNotice(to string, done *outcome) string {
	raw, err := json.Marshal(notice{done.do, done.ok, done.failed, done.more})
	if err != nil {
		return to
	}
	text := base64.RawURLEncoding.EncodeToString(raw)
	sep := "?"
	if strings.Contains(to, "?") {
		sep = "&"
	}
	return to + sep + url.Values{"done": {text + "." + c.sign("notice", text)}}.Encode()
}

func (c *Console) noticeOf(r *http.Request) *notice {
	text, sig, ok := strings.Cut(r.URL.Query().Get("done"), ".")
	if !ok || !c.signed(sig, "notice", text) {
		return nil
	}
	raw, err := base64.RawURLEncoding.DecodeString(text)
	var n notice
	if err != nil || json.Unmarshal(raw, &n) != nil {
		return nil
	}
	return &n
}
