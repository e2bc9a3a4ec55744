package lua

import (
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	gopher "github.com/yuin/gopher-lua"
	"github.com/yuin/gopher-lua/ast"
	"github.com/yuin/gopher-lua/parse"
)

// scriptTexts are the scripts by verb, with their includes expanded.
func scriptTexts(t *testing.T) map[string]string {
	t.Helper()
	names, err := filepath.Glob("*.lua")
	if err != nil || len(names) == 0 {
		t.Fatal(names, err)
	}
	texts := map[string]string{}
	for _, name := range names {
		verb := strings.TrimSuffix(name, ".lua")
		texts[verb] = load(verb)
	}
	return texts
}

// A syntax is what the tests want to know of a script's body.
type syntax struct {
	keys      map[int]bool // KEYS that are read
	argv      map[int]bool // ARGV that are read by number
	run       bool         // whether ARGV is read by a computed place, too
	calls     [][]ast.Expr // arguments of redis.call, in order
	values    map[string][]ast.Expr
	params    map[string]bool // of functions
	loops     map[string][]int
	forbidden []string
}

func syntaxOf(t *testing.T, text string) *syntax {
	t.Helper()
	chunk, err := parse.Parse(strings.NewReader(text), "script")
	if err != nil {
		t.Fatal(err)
	}
	s := &syntax{
		keys: map[int]bool{}, argv: map[int]bool{}, values: map[string][]ast.Expr{}, params: map[string]bool{}, loops: map[string][]int{},
	}
	each(reflect.ValueOf(chunk), s.declared)
	each(reflect.ValueOf(chunk), s.used)
	return s
}

// each calls visit for every node of a syntax tree.
func each(v reflect.Value, visit func(node any)) {
	switch v.Kind() {
	case reflect.Interface:
		each(v.Elem(), visit)
	case reflect.Pointer:
		if !v.IsNil() {
			visit(v.Interface())
			each(v.Elem(), visit)
		}
	case reflect.Slice:
		for i := range v.Len() {
			each(v.Index(i), visit)
		}
	case reflect.Struct:
		for i := range v.NumField() {
			if v.Type().Field(i).IsExported() {
				each(v.Field(i), visit)
			}
		}
	}
}

// declared notes what names stand for.
func (s *syntax) declared(node any) {
	switch n := node.(type) {
	case *ast.LocalAssignStmt:
		for i, name := range n.Names {
			if i < len(n.Exprs) {
				s.values[name] = append(s.values[name], n.Exprs[i])
			}
		}
	case *ast.AssignStmt:
		for i, left := range n.Lhs {
			if name, ok := left.(*ast.IdentExpr); ok && i < len(n.Rhs) {
				s.values[name.Value] = append(s.values[name.Value], n.Rhs[i])
			}
		}
	case *ast.FunctionExpr:
		for _, name := range n.ParList.Names {
			s.params[name] = true
		}
	case *ast.NumberForStmt:
		from, ok1 := number(n.Init)
		to, ok2 := number(n.Limit)
		if ok1 && ok2 {
			for i := from; i <= to; i++ {
				s.loops[n.Name] = append(s.loops[n.Name], i)
			}
		}
	case *ast.GenericForStmt: // for _, k in ipairs({ 1, 2, 3 })
		if call, ok := n.Exprs[0].(*ast.FuncCallExpr); ok && len(call.Args) == 1 && len(n.Names) == 2 {
			if list, ok := call.Args[0].(*ast.TableExpr); ok {
				for _, f := range list.Fields {
					if i, ok := number(f.Value); ok {
						s.loops[n.Names[1]] = append(s.loops[n.Names[1]], i)
					}
				}
			}
		}
	}
}

func (s *syntax) used(node any) {
	switch n := node.(type) {
	case *ast.AttrGetExpr:
		switch name(n.Object) {
		case "KEYS":
			if i, ok := number(n.Key); ok {
				s.keys[i] = true
			} else if loop := s.loops[name(n.Key)]; len(loop) > 0 {
				for _, i := range loop {
					s.keys[i] = true
				}
			} else {
				s.forbidden = append(s.forbidden, "a computed place in KEYS")
			}
		case "ARGV":
			if i, ok := number(n.Key); ok {
				s.argv[i] = true
			} else {
				s.run = true
			}
		}
	case *ast.FuncCallExpr:
		switch what := name(n.Func); {
		case what == "unpack" && name(n.Args[0]) == "ARGV":
			s.run = true
		case what == "redis.call":
			s.calls = append(s.calls, n.Args)
		case strings.HasPrefix(what, "redis.") && what != "redis.error_reply":
			s.forbidden = append(s.forbidden, what)
		}
	}
}

func number(e ast.Expr) (int, bool) {
	n, ok := e.(*ast.NumberExpr)
	if !ok {
		return 0, false
	}
	i, err := strconv.Atoi(n.Value)
	return i, err == nil
}

// name is the source of a name or of a.b, else empty.
func name(e ast.Expr) string {
	switch n := e.(type) {
	case *ast.IdentExpr:
		return n.Value
	case *ast.AttrGetExpr:
		if field, ok := n.Key.(*ast.StringExpr); ok {
			return name(n.Object) + "." + field.Value
		}
	}
	return ""
}

// isKey reports whether an expression is an element of KEYS, or a name that stands for nothing else.
func (s *syntax) isKey(e ast.Expr) bool {
	switch n := e.(type) {
	case *ast.AttrGetExpr:
		what := name(n)
		return name(n.Object) == "KEYS" || what == "g.cur" || what == "g.prev" // of tombs: two of its parameters
	case *ast.FuncCallExpr:
		return name(n.Func) == "open_tombs"
	case *ast.LogicalOpExpr: // only if there is something to do: ... and open_tombs(...)
		return n.Operator == "and" && s.isKey(n.Rhs)
	case *ast.IdentExpr:
		if s.params[n.Value] && len(s.values[n.Value]) == 0 {
			return true
		}
		for _, value := range s.values[n.Value] {
			if !s.isKey(value) {
				return false
			}
		}
		return len(s.values[n.Value]) > 0
	}
	return false
}

var slot = regexp.MustCompile(`(?m)^(KEYS|ARGV)\[(\d+)\] +(.*)$`)

// A header that names another KEYS or ARGV than the body reads is a lie; "ARGV[5] from here" stands for a run of unknown
// length, which the body reads by computed places.
func TestHeadersNameWhatBodiesRead(t *testing.T) {
	for verb, text := range scriptTexts(t) {
		t.Run(verb, func(t *testing.T) {
			head, body, ok := strings.Cut(text, "]]\n")
			if !ok || !strings.HasPrefix(head, "--[[\n") || !strings.Contains(head, "\nReturns  ") {
				t.Fatal("the script has no header, or it says nothing of what it returns")
			}
			keys, argv, run := map[int]bool{}, map[int]bool{}, false
			last := map[string]int{}
			for _, m := range slot.FindAllStringSubmatch(head, -1) {
				i, _ := strconv.Atoi(m[2])
				if i <= last[m[1]] || m[1] == "ARGV" && i != last["ARGV"]+1 {
					t.Errorf("%s[%d] is out of order", m[1], i)
				}
				last[m[1]] = i
				switch {
				case m[1] == "KEYS":
					keys[i] = true
				case strings.HasPrefix(m[3], "from here"):
					run = true
				case run:
					t.Errorf("ARGV[%d] lies within the run", i)
				default:
					argv[i] = true
				}
			}
			s := syntaxOf(t, body)
			if run {
				delete(s.argv, last["ARGV"]) // its first place may be read by number, too
			}
			if got, want := sorted(s.keys), sorted(keys); !slices.Equal(got, want) {
				t.Errorf("the header has KEYS %v, the body reads %v", want, got)
			}
			if got, want := sorted(s.argv), sorted(argv); !slices.Equal(got, want) {
				t.Errorf("the header has ARGV %v, the body reads %v", want, got)
			}
			if s.run != run {
				t.Errorf("the header has a run of ARGV: %v, the body reads one: %v", run, s.run)
			}
		})
	}
}

func sorted(set map[int]bool) []int { return slices.Sorted(maps.Keys(set)) }

// Clusters and managed servers know a script's keys from KEYS alone.
func TestEveryCommandNamesAKeyOfKEYS(t *testing.T) {
	for verb, text := range scriptTexts(t) {
		s := syntaxOf(t, text)
		for _, args := range s.calls {
			command, ok := args[0].(*ast.StringExpr)
			switch {
			case !ok:
				t.Errorf("%s: a command that is not written out", verb)
			case command.Value == "TIME":
			case len(args) < 2 || !s.isKey(args[1]):
				t.Errorf("%s: line %d: the key of %s is not an element of KEYS", verb, args[0].Line(), command.Value)
			}
		}
		if len(s.calls) == 0 {
			t.Errorf("%s calls nothing", verb)
		}
	}
}

// The scripts run on Redis, Valkey, Dragonfly, managed servers and imitations of Redis: they keep to what all have.
func TestScriptsStayInTheCommonSubset(t *testing.T) {
	allowed := []string{"ARGV", "KEYS", "ipairs", "math", "pairs", "redis", "string", "table", "tonumber", "unpack"}
	commands := map[string]bool{}
	for verb, text := range scriptTexts(t) {
		if strings.HasPrefix(text, "#!") {
			t.Errorf("%s has a #! line", verb)
		}
		s := syntaxOf(t, text)
		for _, what := range s.forbidden {
			t.Errorf("%s uses %s", verb, what)
		}
		for _, args := range s.calls {
			if command, ok := args[0].(*ast.StringExpr); ok {
				commands[command.Value] = true
			}
		}
		chunk, err := parse.Parse(strings.NewReader(text), verb)
		if err != nil {
			t.Fatal(err)
		}
		proto, err := gopher.Compile(chunk, verb)
		if err != nil {
			t.Fatal(err)
		}
		for _, use := range globals(proto) {
			if use.set {
				t.Errorf("%s: %s is a global; make it local", verb, use.name)
			} else if !slices.Contains(allowed, use.name) {
				t.Errorf("%s uses %s", verb, use.name)
			}
		}
	}
	for command := range commands {
		if slices.Contains([]string{"SCAN", "HSCAN", "ZSCAN", "KEYS", "EVAL", "DEL", "EXPIRE"}, command) || command != strings.ToUpper(command) {
			t.Errorf("a script calls %s", command)
		}
	}
}

type globalUse struct {
	name string
	set  bool
}

// globals are the global names that compiled code reads and sets.
func globals(p *gopher.FunctionProto) (uses []globalUse) {
	const opcodeShift, operandMask = 26, 1<<18 - 1 // of gopher-lua's instructions
	for _, code := range p.Code {
		if op := int(code >> opcodeShift); op == gopher.OP_GETGLOBAL || op == gopher.OP_SETGLOBAL {
			uses = append(uses, globalUse{p.Constants[code&operandMask].String(), op == gopher.OP_SETGLOBAL})
		}
	}
	for _, inner := range p.FunctionPrototypes {
		uses = append(uses, globals(inner)...)
	}
	return uses
}

// An include takes what it uses as parameters, so that a reader of a script sees every key, and includes nothing itself.
func TestIncludesReadNoArguments(t *testing.T) {
	names, err := filepath.Glob("include/*.lua")
	if err != nil || len(names) == 0 {
		t.Fatal(names, err)
	}
	for _, file := range names {
		text := read(file)
		for _, word := range []string{"KEYS", "ARGV", "@include"} {
			if regexp.MustCompile(`(?m)^[^-\n]*\b` + word + `\b|^--- ` + word).MatchString(text) {
				t.Errorf("%s has %s", file, word)
			}
		}
	}
	for verb := range scriptTexts(t) {
		if strings.Contains(load(verb), "@include") {
			t.Errorf("%s: an include was not expanded", verb)
		}
	}
}

func TestAMissingIncludeIsAMistakeOfTheBuild(t *testing.T) {
	defer func() {
		if recover() == nil {
			t.Error("no panic")
		}
	}()
	read("include/nonsense.lua")
}

var (
	codeRow  = regexp.MustCompile("(?m)^\\| (-?\\d+) \\| `(code\\w+)` \\|")
	codeName = regexp.MustCompile(`(-?\d+)\}?\s[^(){}]*?\s*\(([A-Z_]+)\)`)
)

// Codes are written down in three places: the Go constants, the table of README.md, and the headers of the scripts.
func TestCodesAreTheSameEverywhere(t *testing.T) {
	constants := goCodes(t)
	table := map[string]int{}
	readme, err := os.ReadFile("README.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range codeRow.FindAllStringSubmatch(string(readme), -1) {
		table[m[2]], _ = strconv.Atoi(m[1])
	}
	if !maps.Equal(table, constants) {
		t.Errorf("README.md has %v\nthe package has %v", table, constants)
	}
	seen := 0
	for verb, text := range scriptTexts(t) {
		head, _, _ := strings.Cut(text, "]]\n")
		_, returns, _ := strings.Cut(head, "\nReturns  ")
		for _, item := range regexp.MustCompile(`[,;:]\s`).Split(returns, -1) {
			for _, m := range codeName.FindAllStringSubmatch(item, -1) {
				seen++
				code, _ := strconv.Atoi(m[1])
				name := "code" + camel(m[2])
				if want, ok := constants[name]; !ok || want != code {
					t.Errorf("the header of %s has %d (%s), the package has %s = %d", verb, code, m[2], name, want)
				}
			}
		}
		for _, m := range regexp.MustCompile(`\(([A-Z_]{3,})\)`).FindAllStringSubmatch(returns, -1) {
			if _, ok := constants["code"+camel(m[1])]; !ok {
				t.Errorf("the header of %s has the code %s, which the package does not know", verb, m[1])
			}
		}
	}
	if seen < 30 {
		t.Errorf("only %d codes were found in headers", seen)
	}
}

func camel(name string) string {
	var b strings.Builder
	for word := range strings.SplitSeq(name, "_") {
		b.WriteString(word[:1] + strings.ToLower(word[1:]))
	}
	return b.String()
}

// goCodes are the constants of package delayq whose names begin with code.
func goCodes(t *testing.T) map[string]int {
	t.Helper()
	source, err := os.ReadFile("../delayq/script.go")
	if err != nil {
		t.Fatal(err)
	}
	codes := map[string]int{}
	for _, m := range regexp.MustCompile(`(?m)^\t(code[A-Z]\w*) += (-?\d+)`).FindAllStringSubmatch(string(source), -1) {
		codes[m[1]], _ = strconv.Atoi(m[2])
	}
	return codes
}
