package console

import (
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/base64"
	"encoding/hex"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/delayq/toolkit/monitor"
)

// LeastToken is the fewest bytes of a Config.Token.
const LeastToken = 16

const (
	sessionLife = 12 * time.Hour
	mostSlow    = 8 // wrong tokens that wait for their answer at once
)

// keyOf makes the key that signs what the browser keeps. Without a token it lives as long as the process.
func keyOf(token string) []byte {
	if token == "" {
		key := make([]byte, sha256.Size)
		_, _ = rand.Read(key) // it never fails
		return key
	}
	mac := hmac.New(sha256.New, []byte(token))
	mac.Write([]byte("delayq console, version 1"))
	return mac.Sum(nil)
}

// sign makes a signature over parts, none of which can run into the next.
func (c *Console) sign(parts ...string) string {
	mac := hmac.New(sha256.New, c.key)
	for _, p := range parts {
		mac.Write([]byte(strconv.Itoa(len(p)) + ":" + p))
	}
	return base64.RawURLEncoding.EncodeToString(mac.Sum(nil))
}

func (c *Console) signed(sig string, parts ...string) bool {
	return subtle.ConstantTimeCompare([]byte(sig), []byte(c.sign(parts...))) == 1
}

// session is who a bearer token or a cookie stands for.
func (c *Console) session(r *http.Request) (string, error) {
	if scheme, token, ok := strings.Cut(r.Header.Get("Authorization"), " "); ok && strings.EqualFold(scheme, "Bearer") {
		if !monitor.SameToken(strings.TrimSpace(token), c.cfg.Token) {
			return "", errBadToken
		}
		return "token", nil
	}
	for _, secure := range []bool{true, false} {
		cookie, err := r.Cookie(c.cookieName(secure))
		if err != nil {
			continue
		}
		ends, sig, _ := strings.Cut(cookie.Value, ".")
		if at, err := strconv.ParseInt(ends, 10, 64); err == nil && c.signed(sig, "session", ends) && c.now().Unix() < at {
			return "token", nil
		}
	}
	return "", errNoSession
}

// cookieName differs by token: browsers share the cookies of all ports of a host.
func (c *Console) cookieName(secure bool) string {
	name := "delayq-" + hex.EncodeToString([]byte(c.sign("cookie")))[:12]
	if secure {
		return "__Host-" + name
	}
	return name
}

// secure reports whether the browser speaks TLS, with us or with a proxy that says so.
func (c *Console) secure(r *http.Request) bool {
	return r.TLS != nil || c.fromProxy(r) && strings.EqualFold(r.Header.Get("X-Forwarded-Proto"), "https")
}

func (c *Console) loginPage(w http.ResponseWriter, r *http.Request) {
	if _, err := c.who(r); err == nil {
		http.Redirect(w, r, localPath(r.URL.Query().Get("next")), http.StatusSeeOther)
		return
	}
	if c.cfg.Token == "" {
		c.fail(w, r, errNoUser)
		return
	}
	c.show(w, r, http.StatusOK, "login", text("login.title"), loginData{Next: localPath(r.URL.Query().Get("next"))})
}

type loginData struct {
	Next  string
	Wrong bool
}

func (c *Console) login(w http.ResponseWriter, r *http.Request) {
	r.Body = http.MaxBytesReader(w, r.Body, 8<<10)
	if c.cfg.Token == "" || r.ParseForm() != nil {
		c.fail(w, r, errBadForm)
		return
	}
	next := localPath(r.PostForm.Get("next"))
	if !monitor.SameToken(strings.TrimSpace(r.PostForm.Get("token")), c.cfg.Token) {
		if err := c.slowDown(r, nil); err != nil {
			c.fail(w, r, err)
			return
		}
		c.show(w, r, http.StatusUnauthorized, "login", text("login.title"), loginData{Next: next, Wrong: true})
		return
	}
	ends := c.now().Add(sessionLife)
	secs := strconv.FormatInt(ends.Unix(), 10)
	secure := c.secure(r)
	http.SetCookie(w, &http.Cookie{
		Name: c.cookieName(secure), Value: secs + "." + c.sign("session", secs), Path: "/", Expires: ends, MaxAge: int(sessionLife.Seconds()),
		HttpOnly: true, Secure: secure, SameSite: http.SameSiteStrictMode,
	})
	c.log.Info("console: login", "peer", r.RemoteAddr)
	http.Redirect(w, r, next, http.StatusSeeOther)
}

func (c *Console) logout(w http.ResponseWriter, r *http.Request) {
	for _, secure := range []bool{true, false} {
		http.SetCookie(w, &http.Cookie{
			Name: c.cookieName(secure), Path: "/", MaxAge: -1, HttpOnly: true, Secure: secure, SameSite: http.SameSiteStrictMode,
		})
	}
	http.Redirect(w, r, "/login", http.StatusSeeOther)
}

// slowDown holds up the answer to a wrong token, and says err after it. So guesses come at a few a second, from however many
// addresses, and who has the right token is never locked out.
func (c *Console) slowDown(r *http.Request, err error) error {
	c.log.Warn("console: wrong token", "peer", r.RemoteAddr)
	select {
	case c.slow <- struct{}{}:
		defer func() { <-c.slow }()
	default:
		return errTooMany
	}
	select {
	case <-time.After(c.penalty):
	case <-r.Context().Done():
	}
	return err
}

// localPath is a path of this server, whatever a link says.
func localPath(next string) string {
	if !strings.HasPrefix(next, "/") || strings.HasPrefix(next, "//") || strings.ContainsAny(next, "\\\r\n\t") {
		return "/"
	}
	return next
}
