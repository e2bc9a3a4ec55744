package console

import (
	_ "embed"
	"encoding/json"
	"fmt"
	"strings"
)

// The catalogue has every text that a person reads, by key. A translation is another file of the same keys; a text with a number
// has its forms under key.one and key.other.
//
//go:embed texts/en.json
var english []byte

var catalogue = func() map[string]string {
	texts := map[string]string{}
	if err := json.Unmarshal(english, &texts); err != nil {
		panic(err) // embedded and tested
	}
	return texts
}()

// text is the text of a key, with its %s and %d filled in.
func text(key string, args ...any) string {
	t, ok := catalogue[key]
	if !ok {
		return "[" + key + "]"
	}
	if len(args) > 0 {
		return fmt.Sprintf(t, args...)
	}
	return t
}

// count is a text that depends on a number, which is its first argument.
func count[N int | int64](key string, n N, args ...any) string {
	form := ".other"
	if n == 1 {
		form = ".one"
	}
	return text(key+form, append([]any{number(n)}, args...)...)
}

// spoken are the texts that scripts need.
func spoken() map[string]string {
	out := map[string]string{}
	for key, t := range catalogue {
		if name, ok := strings.CutPrefix(key, "js."); ok {
			out[name] = t
		}
	}
	return out
}
