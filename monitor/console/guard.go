package console

import (
	"context"
	"errors"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"strings"
	"unicode/utf8"
)

// policy lets a page load what this server has, and nothing inline.
const policy = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; form-action 'self'; " +
	"base-uri 'none'; frame-ancestors 'none'"

func withHeaders(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h := w.Header()
		h.Set("Content-Security-Policy", policy)
		h.Set("X-Content-Type-Options", "nosniff")
		h.Set("X-Frame-Options", "DENY")
		h.Set("Referrer-Policy", "same-origin") // with no-referrer, forms over plain HTTP would come from the origin "null"
		h.Set("Cross-Origin-Resource-Policy", "same-origin")
		h.Set("Permissions-Policy", "camera=(), microphone=(), geolocation=(), payment=(), usb=()")
		h.Set("Cache-Control", "no-store")
		next.ServeHTTP(w, r)
	})
}

// sameOrigin refuses writes that another site's page has sent.
func (c *Console) sameOrigin(next http.Handler) http.Handler {
	guard := http.NewCrossOriginProtection()
	for _, host := range c.cfg.Hosts { // a proxy may pass on another Host than the browser's
		for _, scheme := range []string{"https://", "http://"} {
			_ = guard.AddTrustedOrigin(scheme + host) // what is no host matches no request either
		}
	}
	guard.SetDenyHandler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		c.log.Warn("console: refused a request from another site", "peer", r.RemoteAddr, "path", r.URL.Path)
		c.fail(w, r, errCrossSite)
	}))
	return guard.Handler(next)
}

type userKey struct{}

// userOf is who the guard let in.
func userOf(r *http.Request) string {
	name, _ := r.Context().Value(userKey{}).(string)
	return name
}

// onlyUsers lets in who may see the console. Who may not is shown the way in, if there is one.
func (c *Console) onlyUsers(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		name, err := c.who(r)
		switch {
		case err == nil:
			next.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), userKey{}, name)))
		case errors.Is(err, errNoSession) && r.Method == http.MethodGet && r.Header.Get("Authorization") == "":
			to := "/login?next=" + url.QueryEscape(r.URL.RequestURI())
			if r.Header.Get("HX-Request") != "" || r.URL.Path == "/series" { // a script asks: it leads the browser there
				w.Header().Set("HX-Redirect", to)
				http.Error(w, text("error.session.title"), http.StatusUnauthorized)
				return
			}
			http.Redirect(w, r, to, http.StatusSeeOther)
		default:
			if errors.Is(err, errBadToken) {
				err = c.slowDown(r, err)
			}
			c.fail(w, r, err)
		}
	})
}

// who says in whose name a request is made.
func (c *Console) who(r *http.Request) (string, error) {
	if h := c.cfg.TrustedProxyHeader; h != "" && c.fromProxy(r) {
		if name := strings.TrimSpace(r.Header.Get(h)); name != "" {
			if !c.knownHost(r.Host) {
				return "", errHost
			}
			if len(name) > 200 || !utf8.ValidString(name) {
				return "", errNoUser
			}
			return name, nil
		}
	}
	switch {
	case c.cfg.Token != "":
		return c.session(r)
	case c.cfg.TrustedProxyHeader != "":
		return "", errNoUser
	case !c.local(r):
		return "", errNotLocal
	case !c.knownHost(r.Host):
		return "", errHost
	}
	return "local", nil
}

// fromProxy reports whether the peer of the connection is where the proxy may be.
func (c *Console) fromProxy(r *http.Request) bool {
	peer, err := netip.ParseAddrPort(r.RemoteAddr)
	return err == nil && slices.ContainsFunc(c.cfg.TrustedProxies, func(p netip.Prefix) bool { return p.Contains(peer.Addr().Unmap().WithZone("")) })
}

// proxyHeaders are what proxies add to a request that they pass on. X-Forwarded-* are a family.
var proxyHeaders = []string{"Forwarded", "Via", "X-Real-Ip", "X-Client-Ip", "Cf-Connecting-Ip", "True-Client-Ip"}

// local reports whether a request comes from this machine, and not by a proxy on it that stands for others. A proxy that adds nothing
// cannot be told from a browser, but those that speak HTTP/1.0 to servers can, as nginx does unless told otherwise.
func (c *Console) local(r *http.Request) bool {
	for h := range r.Header { // even empty: a proxy has been there
		if strings.HasPrefix(h, "X-Forwarded") || slices.Contains(proxyHeaders, h) {
			return false
		}
	}
	here, ok := r.Context().Value(http.LocalAddrContextKey).(net.Addr)
	return ok && r.ProtoAtLeast(1, 1) && loopback(here.String()) && loopback(r.RemoteAddr)
}

func loopback(addr string) bool {
	a, err := netip.ParseAddrPort(addr)
	return err == nil && a.Addr().Unmap().IsLoopback()
}

// knownHost guards against a foreign page that lets its own name point to this machine.
func (c *Console) knownHost(hostport string) bool {
	host, _, err := net.SplitHostPort(hostport)
	if err != nil {
		host = strings.Trim(hostport, "[]")
	}
	if strings.EqualFold(host, "localhost") || slices.ContainsFunc(c.cfg.Hosts, func(h string) bool { return strings.EqualFold(h, host) }) {
		return true
	}
	a, err := netip.ParseAddr(host)
	return err == nil && a.Unmap().IsLoopback()
}
