package functions

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/caarlos0/env/v11"
	"gopkg.in/yaml.v3"
)

// No tool that checks SAM templates runs without the cloud and knows ScheduleV2, so this test is
// the checker. It looks at each function with the Globals merged in and every !Ref to a parameter
// replaced by the parameter's default, which is what a first deployment gets.

// configs says which struct a function reads its environment into, unread what of it a function has no use for.
var (
	configs = map[string]any{
		"WorkerFunction": &Config{}, "ReconcilerFunction": &Config{}, "MonitorFunction": &Config{}, "MetricsFunction": &Config{},
	}
	ofWorkers = []string{
		"DELAYQ_CONCURRENCY", "DELAYQ_LEASE", "DELAYQ_TIMEOUT", "DELAYQ_MAX_POLL", "DELAYQ_IDLE_EXIT", "DELAYQ_BATON_GROUP", "DELAYQ_RUNNERS",
	}
	unread = map[string][]string{
		"WorkerFunction":     {"DELAYQ_MONITOR_TOKEN", "DELAYQ_METRICS_NAMESPACE"},
		"ReconcilerFunction": append([]string{"DELAYQ_MONITOR_TOKEN", "DELAYQ_METRICS_NAMESPACE"}, ofWorkers...),
		"MonitorFunction":    append([]string{"DELAYQ_MONITOR_TOKEN"}, ofWorkers...),
		"MetricsFunction":    append([]string{"DELAYQ_METRICS_NAMESPACE"}, ofWorkers...),
	}
)

const templatePath = "../template.yaml"

func TestTemplate(t *testing.T) {
	text, err := os.ReadFile(templatePath)
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range templateProblems(string(text)) {
		t.Error(p)
	}
}

// Each line breaks the template in one way, and must be noticed for that reason.
func TestTemplateRulesBite(t *testing.T) {
	text, err := os.ReadFile(templatePath)
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct{ name, old, new, want string }{
		{"not YAML", "Resources:", "Resources: [", "did not find expected"},
		{"a key twice", "    MemorySize: 256\n", "    MemorySize: 256\n    MemorySize: 512\n", `"MemorySize" is there twice`},
		{"no transform", "Transform: AWS::Serverless-2016-10-31\n", "", "Transform"},
		{"unknown section", "Outputs:", "Output:", "unknown section Output"},
		{"unknown parameter type", "Type: CommaDelimitedList", "Type: CommaList", "type CommaList"},
		{"unknown resource type", "AWS::Logs::LogGroup", "AWS::Logs::Group", "unknown type AWS::Logs::Group"},
		{"unknown property of a function", "ReservedConcurrentExecutions", "ReservedConcurrency", "unknown property ReservedConcurrency"},
		{"unknown global", "    MemorySize: 256", "    Memory: 256", "unknown property Memory"},
		{"Ref to nothing", "!Ref RedisCluster", "!Ref RedisClustre", "Ref RedisClustre"},
		{"GetAtt of nothing", "!GetAtt WorkerFunction.Arn", "!GetAtt Worker.Arn", "GetAtt Worker"},
		{"If of nothing", "      - HasPassword\n", "      - HasPasswort\n", "If HasPasswort"},
		{"Sub of nothing", "${RedisPasswordSecretArn}", "${RedisSecretArn}", "Sub RedisSecretArn"},
		{"Condition of nothing", "Type: AWS::Logs::LogGroup", "Type: AWS::Logs::LogGroup\n    Condition: HasLogs", "Condition HasLogs"},
		{"runtime", "provided.al2023", "go1.x", "Runtime is go1.x"},
		{"handler", "Handler: bootstrap", "Handler: main", "Handler is main"},
		{"architecture", "Default: arm64", "Default: arm65", "architecture arm65"},
		{"no code", "build/worker/", "build/labourer/", "no functions/labourer/main.go"},
		{"code elsewhere", "build/worker/", "functions/worker/", "CodeUri is functions/worker/"},
		{"timeout over the limit", "Timeout: 300", "Timeout: 901", "Timeout 901s is more than 900s"},
		{"timeout not a number", "Timeout: 300", "Timeout: five minutes", "Timeout is five minutes"},
		{"timeout of too few ticks", "Timeout: 300", "Timeout: 120", "Timeout 120s does not hold 3 ticks"},
		{"timeout short of the runners", `DELAYQ_RUNNERS: "1"`, `DELAYQ_RUNNERS: "8"`, "does not hold 10 ticks"},
		{"handlers that outlive the function", "DELAYQ_TIMEOUT: 50s", "DELAYQ_TIMEOUT: 5m", "DELAYQ_TIMEOUT 5m0s"},
		{"handlers that block the hand-over", "DELAYQ_TIMEOUT: 50s", "DELAYQ_TIMEOUT: 2m", "DELAYQ_TIMEOUT 2m0s"},
		{"no reserve", "      ReservedConcurrentExecutions: 2\n", "", "ReservedConcurrentExecutions"},
		{"a reserve that throttles the next tick", "ReservedConcurrentExecutions: 2", "ReservedConcurrentExecutions: 1", "ReservedConcurrentExecutions 1"},
		{"no baton", "          DELAYQ_BATON_GROUP: worker\n", "", "DELAYQ_BATON_GROUP is not set"},
		{"a variable nobody reads", "DELAYQ_MAX_POLL:", "DELAYQ_MAXPOLL:", "DELAYQ_MAXPOLL is set, and nothing reads it"},
		{"a variable that is not set", "        DELAYQ_QUEUES: !Ref Queues\n", "", "DELAYQ_QUEUES is not set"},
		{"a value that is refused", "DELAYQ_LEASE: 30s", "DELAYQ_LEASE: 30ms", "DELAYQ_LEASE: must be 1 s to 12 h, got 30ms"},
		{"async retries", "      MaximumRetryAttempts: 0\n      MaximumEventAgeInSeconds: 60\n    Env", "      MaximumRetryAttempts: 2\n      MaximumEventAgeInSeconds: 60\n    Env", "EventInvokeConfig: MaximumRetryAttempts is 2"},
		{"old async events", "      MaximumEventAgeInSeconds: 60\n    Env", "      MaximumEventAgeInSeconds: 21600\n    Env", "EventInvokeConfig: MaximumEventAgeInSeconds is 21600"},
		{"no async limits", "    EventInvokeConfig:\n      MaximumRetryAttempts: 0\n      MaximumEventAgeInSeconds: 60\n", "", "EventInvokeConfig: MaximumRetryAttempts is <nil>"},
		{"schedule retries", "              MaximumRetryAttempts: 0", "              MaximumRetryAttempts: 185", "RetryPolicy: MaximumRetryAttempts is 185"},
		{"late ticks", "              MaximumEventAgeInSeconds: 60", "              MaximumEventAgeInSeconds: 3600", "RetryPolicy: MaximumEventAgeInSeconds is 3600"},
		{"event type", "Type: ScheduleV2", "Type: ScheduleV3", "event type ScheduleV3"},
		{"the older schedule", "Type: ScheduleV2", "Type: Schedule", "event type Schedule"},
		{"no events", "      Events:\n        Tick:", "      Event:\n        Tick:", "no event starts it"},
		{"unit of the rate", "rate(1 minute)", "rate(1 minutes)", "ScheduleExpression"},
		{"rate below a minute", "rate(1 minute)", "rate(10 seconds)", "ScheduleExpression"},
		{"bare OFF", `Mode: "OFF"`, "Mode: OFF", "OFF without quotes"},
		{"no window", "            FlexibleTimeWindow:\n              Mode: \"OFF\"\n", "", "FlexibleTimeWindow"},
		{"a secret in the open", `!Sub "{{resolve:secretsmanager:${RedisPasswordSecretArn}}}"`, "hunter2", "DELAYQ_REDIS_PASSWORD does not come from a secret store"},
		{"a secret by parameter", `!Sub "{{resolve:secretsmanager:${RedisPasswordSecretArn}}}"`, "!Ref ScriptHeader", "DELAYQ_REDIS_PASSWORD does not come from a secret store"},
		{"the database's secret in the open", `!Sub "{{resolve:secretsmanager:${DatabasePasswordSecretArn}}}"`, "hunter2", "DELAYQ_DATABASE_PASSWORD does not come from a secret store"},
		{"a reconciler without a ledger", "    Condition: HasDatabase\n    Properties:\n      Description: Repairs", "    Properties:\n      Description: Repairs", "deployed where there is no database"},
		{"a reconciler that is cut short", "      Timeout: 60\n", "      Timeout: 10\n", "Timeout 10s: want 30s to a tick"},
		{"a reconciler that outlives its tick", "      Timeout: 60\n", "      Timeout: 300\n", "Timeout 5m0s: want 30s to a tick"},
		{"a reconciler throttled", "so that a tick is not throttled by the end of the one before.\n      ReservedConcurrentExecutions: 2", "so.\n      ReservedConcurrentExecutions: 1", "ReservedConcurrentExecutions 1: want 2"},
		{"a horizon of a tick", "    Default: 0s\n", "    Default: 1m\n", "DELAYQ_HORIZON 1m0s: want 0 or 5 ticks"},
		{"a horizon that is none", "    Default: 0s\n", "    Default: never\n", `DELAYQ_HORIZON: "never" is not a duration`},
		{"logs of a reconciler that is not there", "    Condition: HasDatabase\n    Properties:\n      RetentionInDays", "    Condition: HasPassword\n    Properties:\n      RetentionInDays", "Ref ReconcilerLogGroup: it is not always there, but on condition HasPassword"},
		{"an output that is not always there", "  ReconcilerFunctionArn:\n    Condition: HasDatabase\n", "  ReconcilerFunctionArn:\n", "GetAtt ReconcilerFunction: it is not always there"},
		{"a password in a parameter", "^(postgres(ql)?://([^:@/]*@)?[^@]*)?$", "^postgres.*$", "DatabaseUrl: postgres://user:secret@host:1234/0 is allowed"},
		{"a parameter that takes any address", "    AllowedPattern: \"^rediss?://([^:@/]*@)?[^@]*$\"\n", "", "parameter RedisUrl: "},
		{"a database variable that is not set", "        DELAYQ_DATABASE_URL: !Ref DatabaseUrl\n", "", "DELAYQ_DATABASE_URL is not set"},
		{"no VPC", "    VpcConfig: !If\n", "    VpcConfigs: !If\n", "VpcConfig"},
		{"logs kept for ever", "      RetentionInDays: !Ref LogRetentionDays\n", "      LogGroupClass: STANDARD\n", "RetentionInDays"},
		{"no log group", "      LoggingConfig:\n        LogGroup: !Ref WorkerLogGroup\n", "", "LogGroup"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if !strings.Contains(string(text), tt.old) {
				t.Fatalf("the template has no %q to break", tt.old)
			}
			problems := templateProblems(strings.Replace(string(text), tt.old, tt.new, 1))
			if !slices.ContainsFunc(problems, func(p string) bool { return strings.Contains(p, tt.want) }) {
				t.Errorf("want a problem with %q, have %q", tt.want, problems)
			}
		})
	}
}

// A template is a decoded template.yaml and what was found wrong with it.
type template struct {
	root     map[string]any
	problems []string
}

func templateProblems(text string) []string {
	var node yaml.Node
	if err := yaml.Unmarshal([]byte(text), &node); err != nil {
		return []string{err.Error()}
	}
	t := &template{}
	t.root, _ = t.decode(&node).(map[string]any)
	t.sections()
	t.references(t.root, nil)
	t.parameters()
	t.alarms()
	t.urls()
	for name, r := range t.section("Resources") {
		t.resource(name, asMap(r))
	}
	slices.Sort(t.problems)
	return t.problems
}

func (t *template) bad(format string, args ...any) {
	t.problems = append(t.problems, fmt.Sprintf(format, args...))
}

func (t *template) section(name string) map[string]any { return asMap(t.root[name]) }

func asMap(v any) map[string]any {
	m, _ := v.(map[string]any)
	return m
}

// The words YAML 1.1 takes for booleans and 1.2 for text: what a deployment makes of them depends
// on which one its tool reads.
var ambiguous = regexp.MustCompile(`^(?i:on|off|yes|no|y|n)$`)

// decode turns a node into maps, slices and scalars, with the short tags spelled out: !Ref X
// becomes {"Ref": "X"}.
func (t *template) decode(n *yaml.Node) any {
	tag, custom := strings.CutPrefix(n.Tag, "!")
	custom = custom && !strings.HasPrefix(tag, "!")
	var v any
	switch n.Kind {
	case yaml.DocumentNode:
		return t.decode(n.Content[0])
	case yaml.AliasNode:
		return t.decode(n.Alias)
	case yaml.MappingNode:
		m := map[string]any{}
		for pair := range slices.Chunk(n.Content, 2) {
			if _, again := m[pair[0].Value]; again {
				t.bad("line %d: %q is there twice", pair[0].Line, pair[0].Value)
			}
			m[pair[0].Value] = t.decode(pair[1])
		}
		v = m
	case yaml.SequenceNode:
		list := []any{}
		for _, item := range n.Content {
			list = append(list, t.decode(item))
		}
		v = list
	default:
		if n.Style&(yaml.SingleQuotedStyle|yaml.DoubleQuotedStyle) == 0 && ambiguous.MatchString(n.Value) {
			t.bad("line %d: %s without quotes", n.Line, n.Value)
		}
		if v = n.Value; !custom {
			if err := n.Decode(&v); err != nil {
				t.bad("line %d: %v", n.Line, err)
			}
		}
	}
	switch {
	case !custom:
		return v
	case tag == "Ref" || tag == "Condition":
		return map[string]any{tag: v}
	case tag == "GetAtt":
		if s, ok := v.(string); ok {
			name, attribute, _ := strings.Cut(s, ".")
			v = []any{name, attribute}
		}
	}
	return map[string]any{"Fn::" + tag: v}
}

func (t *template) sections() {
	known := []string{"AWSTemplateFormatVersion", "Transform", "Description", "Metadata", "Mappings", "Rules", "Parameters", "Conditions", "Globals", "Resources", "Outputs"}
	for name := range t.root {
		if !slices.Contains(known, name) {
			t.bad("unknown section %s", name)
		}
	}
	if t.root["Transform"] != "AWS::Serverless-2016-10-31" {
		t.bad("Transform is %v", t.root["Transform"])
	}
	for name, p := range t.section("Parameters") {
		if typ := asMap(p)["Type"]; !slices.Contains([]any{"String", "Number", "CommaDelimitedList"}, typ) {
			t.bad("parameter %s: type %v", name, typ)
		}
	}
	for name := range t.section("Globals") {
		if name != "Function" {
			t.bad("Globals: unknown kind %s", name)
		}
	}
	for name := range asMap(t.section("Globals")["Function"]) {
		t.property("Globals", name)
	}
}

// parameters refuses an address that could bring a password with it: parameters are shown to whoever may look at the stack.
func (t *template) parameters() {
	for name, p := range t.section("Parameters") {
		if !strings.HasSuffix(name, "Url") {
			continue
		}
		pattern, err := regexp.Compile(fmt.Sprint(asMap(p)["AllowedPattern"]))
		if err != nil {
			t.bad("parameter %s: AllowedPattern: %v", name, err)
			continue
		}
		for _, scheme := range []string{"redis", "rediss", "postgres", "postgresql"} {
			if url := scheme + "://user:secret@host:1234/0"; pattern.MatchString(url) {
				t.bad("parameter %s: %s is allowed", name, url)
			}
		}
		if !pattern.MatchString("rediss://user@host:6379") && !pattern.MatchString("postgres://user@host:5432/shop?sslmode=verify-full") {
			t.bad("parameter %s: AllowedPattern %s allows no address", name, pattern)
		}
	}
}

var substitution = regexp.MustCompile(`\$\{([^!}][^}]*)\}`)

// references checks that every name that is spoken of is a name of this template.
func (t *template) references(v any, at []string) {
	refer := func(how, name string, sections ...string) {
		if strings.HasPrefix(name, "AWS::") {
			return
		}
		for _, s := range sections {
			if found, ok := t.section(s)[name]; ok {
				if only := asMap(found)["Condition"]; s == "Resources" && only != asMap(t.section(at[0])[at[1]])["Condition"] {
					t.bad("%s: %s %s: it is not always there, but on condition %v", strings.Join(at, "."), how, name, only)
				}
				return
			}
		}
		t.bad("%s: %s %s: there is no such name", strings.Join(at, "."), how, name)
	}
	switch v := v.(type) {
	case []any:
		for i, item := range v {
			t.references(item, append(at, strconv.Itoa(i)))
		}
	case map[string]any:
		for key, item := range v {
			list, _ := item.([]any)
			text, isText := item.(string)
			switch {
			case key == "Ref":
				refer(key, fmt.Sprint(item), "Parameters", "Resources")
			case key == "Condition" && isText:
				refer(key, text, "Conditions")
			case key == "Fn::GetAtt" && len(list) > 0:
				refer("GetAtt", fmt.Sprint(list[0]), "Resources")
			case key == "Fn::If" && len(list) > 0:
				refer("If", fmt.Sprint(list[0]), "Conditions")
			case key == "Fn::Sub":
				for _, m := range substitution.FindAllStringSubmatch(fmt.Sprint(item), -1) {
					name, _, _ := strings.Cut(m[1], ".")
					refer("Sub", name, "Parameters", "Resources")
				}
			}
			t.references(item, append(at, key))
		}
	}
}

func (t *template) resource(name string, r map[string]any) {
	properties := asMap(r["Properties"])
	switch r["Type"] {
	case "AWS::Serverless::Function":
		for p := range properties {
			t.property(name, p)
		}
		global := asMap(t.section("Globals")["Function"])
		f := function{name: name, template: t, properties: asMap(merge(global, properties))}
		f.build()
		f.environment()
		f.network()
		f.logs()
		f.events()
	case "AWS::Logs::LogGroup":
		if t.value(properties["RetentionInDays"]) == nil {
			t.bad("%s: no RetentionInDays: logs would be kept for ever", name)
		}
	case "AWS::CloudWatch::Alarm", "AWS::Lambda::Url", "AWS::Lambda::Permission": // alarms and urls look at them
	default:
		t.bad("%s: unknown type %v", name, r["Type"])
	}
}

// property refuses misspellings. The list is of what this template uses or soon may.
func (t *template) property(where, name string) {
	if !slices.Contains([]string{
		"Architectures", "CodeUri", "DeadLetterQueue", "Description", "Environment", "EventInvokeConfig", "Events", "FunctionName",
		"FunctionUrlConfig", "Handler", "KmsKeyArn", "LoggingConfig", "MemorySize", "Policies", "RecursiveLoop",
		"ReservedConcurrentExecutions", "Role", "Runtime", "Tags", "Timeout", "Tracing", "VpcConfig",
	}, name) {
		t.bad("%s: unknown property %s", where, name)
	}
}

// merge lays a function over the Globals as SAM does: maps by key, lists end to end, the rest replaced.
func merge(global, own any) any {
	switch o := own.(type) {
	case map[string]any:
		if g, ok := global.(map[string]any); ok {
			both := maps.Clone(g)
			for k, v := range o {
				both[k] = merge(g[k], v)
			}
			return both
		}
	case []any:
		if g, ok := global.([]any); ok {
			return slices.Concat(g, o)
		}
	}
	return own
}

// value is v, or the default of the parameter v refers to.
func (t *template) value(v any) any {
	if name, ok := asMap(v)["Ref"].(string); ok {
		return asMap(t.section("Parameters")[name])["Default"]
	}
	return v
}

// A function is one of the template, as it is deployed.
type function struct {
	*template
	name       string
	properties map[string]any
}

func (f *function) bad(format string, args ...any) {
	f.template.bad(f.name+": "+format, args...)
}

// get follows path through the function's properties.
func (f *function) get(path ...string) any {
	var v any = f.properties
	for _, key := range path {
		v = asMap(v)[key]
	}
	return f.value(v)
}

// seconds is a property that is a whole number of them, 0 if it is something else.
func (f *function) seconds(property string) time.Duration {
	n, ok := f.get(property).(int)
	if !ok {
		f.bad("%s is %v: not a number of seconds", property, f.get(property))
	}
	return time.Duration(n) * time.Second
}

func (f *function) build() {
	for property, want := range map[string]any{"Runtime": "provided.al2023", "Handler": "bootstrap"} {
		if got := f.get(property); got != want {
			f.bad("%s is %v: want %v", property, got, want)
		}
	}
	list, _ := f.get("Architectures").([]any)
	if len(list) != 1 {
		f.bad("Architectures is %v: want one", list)
	}
	for _, a := range list {
		if arch := f.value(a); arch != "arm64" && arch != "x86_64" {
			f.bad("architecture %v", arch)
		}
	}
	uri := fmt.Sprint(f.get("CodeUri"))
	dir, ok := strings.CutPrefix(uri, "build/")
	if !ok || !strings.HasSuffix(dir, "/") {
		f.bad("CodeUri is %s: want build/<function>/, where scripts/build-functions puts it", uri)
		return
	}
	main := filepath.Join(dir, "main.go")
	if text, err := os.ReadFile(main); err != nil || !strings.Contains(string(text), "\npackage main\n") {
		f.bad("CodeUri is %s, and there is no functions/%s of package main", uri, main)
	}
}

// environment checks that what the template sets and what the code reads are the same variables,
// and that the code accepts the values.
func (f *function) environment() {
	config, ok := configs[f.name]
	if !ok {
		f.bad("not in configs: which struct reads its environment?")
		return
	}
	fields, err := env.GetFieldParamsWithOptions(config, env.Options{Prefix: envPrefix})
	if err != nil {
		f.bad("%v", err)
	}
	set := asMap(f.get("Environment", "Variables"))
	read := map[string]bool{}
	for _, field := range fields {
		if slices.Contains(unread[f.name], field.Key) {
			continue
		}
		read[field.Key] = true
		if _, ok := set[field.Key]; !ok {
			f.bad("%s is not set", field.Key)
		}
	}
	for name, v := range set {
		if !read[name] {
			f.bad("%s is set, and nothing reads it", name)
		}
		if (strings.HasSuffix(name, "_PASSWORD") || strings.HasSuffix(name, "_TOKEN")) && !strings.Contains(fmt.Sprint(v), "{{resolve:secretsmanager:") {
			f.bad("%s does not come from a secret store", name)
		}
	}
}

// config is what the function would read from the template.
func (f *function) config() Config {
	vars := map[string]string{}
	for name, v := range asMap(f.get("Environment", "Variables")) {
		if text, ok := f.value(v).(string); ok { // an !If is known only when it is deployed
			vars[name] = text
		}
	}
	cfg, wrong := configFrom(vars)
	for _, p := range wrong {
		f.bad("%s: %s", p.variable, p.text)
	}
	return cfg
}

func (f *function) network() {
	branches, _ := asMap(f.get("VpcConfig"))["Fn::If"].([]any)
	if len(branches) != 3 || asMap(branches[1])["SubnetIds"] == nil || asMap(branches[1])["SecurityGroupIds"] == nil {
		f.bad("VpcConfig is %v: want subnets and security groups on a condition", f.get("VpcConfig"))
	}
}

// logs wants a log group of the template's own: the one Lambda makes keeps everything for ever.
func (f *function) logs() {
	group, _ := asMap(asMap(f.properties["LoggingConfig"])["LogGroup"])["Ref"].(string)
	if asMap(f.section("Resources")[group])["Type"] != "AWS::Logs::LogGroup" {
		f.bad("LoggingConfig: LogGroup is none of the template")
	}
}

var rate = regexp.MustCompile(`^rate\((?:1 minute|([2-9]|[1-9]\d+) minutes)\)$`)

func (f *function) events() {
	events := asMap(f.get("Events"))
	if len(events) == 0 && !f.hasURL() {
		f.bad("no event starts it")
	}
	if f.seconds("Timeout") > 900*time.Second {
		f.bad("Timeout %vs is more than 900s", f.get("Timeout"))
	}
	for name, e := range events {
		event := asMap(e)
		switch event["Type"] {
		case "ScheduleV2":
			f.schedule(name, asMap(event["Properties"]))
		case "SQS", "SNS", "EventBridgeRule":
		default:
			f.bad("%s: event type %v", name, event["Type"])
		}
	}
}

func (f *function) hasURL() bool {
	for _, r := range f.section("Resources") {
		target, _ := asMap(asMap(asMap(r)["Properties"])["TargetFunctionArn"])["Fn::GetAtt"].([]any)
		if asMap(r)["Type"] == "AWS::Lambda::Url" && len(target) == 2 && target[0] == f.name {
			return true
		}
	}
	return false
}

// schedule holds a ticking function to two rules: a tick is never repeated, in either of the two
// queues it passes, and the timeout and the reserve let one invocation relieve the other.
func (f *function) schedule(name string, p map[string]any) {
	for where, limits := range map[string]map[string]any{
		name + ": RetryPolicy": asMap(p["RetryPolicy"]),
		"EventInvokeConfig":    asMap(f.get("EventInvokeConfig")),
	} {
		for limit, want := range map[string]any{"MaximumRetryAttempts": 0, "MaximumEventAgeInSeconds": 60} {
			if !reflect.DeepEqual(limits[limit], want) {
				f.bad("%s: %s is %v: want %v", where, limit, limits[limit], want)
			}
		}
	}
	if mode := asMap(p["FlexibleTimeWindow"])["Mode"]; mode != "OFF" {
		f.bad("%s: FlexibleTimeWindow: Mode is %v: want OFF", name, mode)
	}
	expression := fmt.Sprint(f.value(p["ScheduleExpression"]))
	m := rate.FindStringSubmatch(expression)
	if m == nil {
		f.bad("%s: ScheduleExpression is %s: want rate(1 minute) or rate(N minutes)", name, expression)
		return
	}
	minutes, _ := strconv.Atoi("0" + m[1])
	tick := time.Duration(max(minutes, 1)) * time.Minute
	switch f.name {
	case "WorkerFunction":
		f.baton(tick)
	case "ReconcilerFunction":
		f.slices(tick)
	case "MonitorFunction":
		f.looks(tick)
	}
}

// looks holds the monitor to what its alarms rely on: a look each minute, that is neither cut short nor throttled.
func (f *function) looks(tick time.Duration) {
	if timeout := f.seconds("Timeout"); tick > time.Minute || timeout > tick || timeout < 15*time.Second {
		f.bad("Timeout %s: want 15s to a tick, %s, and that a minute", timeout, tick)
	}
	f.reserve()
	f.config()
}

// reserve wants a place for a tick that comes while the one before is not through.
func (f *function) reserve() {
	if reserve, _ := f.get("ReservedConcurrentExecutions").(int); reserve < 2 {
		f.bad("ReservedConcurrentExecutions %d: want 2, or the next tick is throttled by the end of the last", reserve)
	}
}

// slices holds the reconciler to what it is for: only where there is a ledger, every minute or so, and never throttled.
func (f *function) slices(tick time.Duration) {
	if asMap(f.section("Resources")[f.name])["Condition"] != "HasDatabase" {
		f.bad("it is deployed where there is no database")
	}
	if h := f.config().Horizon; h != 0 && h < 5*tick {
		f.bad("DELAYQ_HORIZON %s: want 0 or 5 ticks, or tasks come into Redis too late", h)
	}
	if timeout := f.seconds("Timeout"); timeout > tick || timeout < 30*time.Second {
		f.bad("Timeout %s: want 30s to a tick, %s", timeout, tick)
	}
	f.reserve()
}

func (f *function) baton(tick time.Duration) {
	cfg := f.config()
	margin := max(cfg.Margin, time.Millisecond)
	runners := max(cfg.Runners, 1)
	// A lost tick must leave no gap: beside its own, each runner waits for the one that relieves
	// it, and for one that may not come.
	timeout, ticks := f.seconds("Timeout"), runners+2
	if need := time.Duration(ticks)*tick + margin; timeout < need {
		f.bad("Timeout %ds does not hold %d ticks and the margin, %s", timeout/time.Second, ticks, need)
	}
	if reserve, _ := f.get("ReservedConcurrentExecutions").(int); reserve <= runners {
		f.bad("ReservedConcurrentExecutions %d: want more than the %d runners, or a new one cannot relieve an old one", reserve, runners)
	}
	if cfg.Timeout == 0 || cfg.Timeout+margin > tick {
		f.bad("DELAYQ_TIMEOUT %s and the margin do not fit the tick: a relieved runner would stay and take the next one's place", cfg.Timeout)
	}
}
