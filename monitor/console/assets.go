package console

import (
	"crypto/sha256"
	"encoding/hex"
	"io/fs"
	"net/http"
)

// assetsVersion stands in the address of every static file, so that browsers may keep them for good.
var assetsVersion = func() string {
	sum := sha256.New()
	err := fs.WalkDir(static, "static", func(name string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		b, err := static.ReadFile(name)
		sum.Write(b)
		return err
	})
	if err != nil {
		panic(err) // a file that is embedded cannot be read: this is not the program that was built
	}
	return hex.EncodeToString(sum.Sum(nil)[:6])
}()

func asset(name string) string { return "/static/" + assetsVersion + "/" + name }

func serveAsset(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Cache-Control", "public, max-age=31536000, immutable")
	http.ServeFileFS(w, r, static, "static/"+r.PathValue("file"))
}
