package functions

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/delayq/toolkit/delayq"
	"github.com/delayq/toolkit/monitor"
	"github.com/delayq/toolkit/reconciler"
)

// emitted are the metrics that the monitor really writes for the whole of the queues.
func emitted() map[string]bool {
	now := time.Now()
	view := &monitor.View{
		At: now, Server: monitor.Server{MemoryUsed: 1, MemoryMax: 2, Policy: "noeviction", LastSaveOK: true},
		Queues: []monitor.QueueView{{
			Name: "orders", Stats: &delayq.Stats{Now: now, LastRun: now, LastSuccess: now, Mode: "ledger"}, Consumers: []delayq.Consumer{{Name: "c", Beat: now}},
			Reconciler: &reconciler.Status{LastFull: now},
		}},
	}
	var out bytes.Buffer
	if err := monitor.WriteEMF(&out, "", view); err != nil {
		panic(err)
	}
	lines := bytes.Split(bytes.TrimSpace(out.Bytes()), []byte("\n"))
	var whole struct {
		AWS struct {
			CloudWatchMetrics []struct {
				Dimensions [][]string
				Metrics    []struct{ Name string }
			}
		} `json:"_aws"`
	}
	if err := json.Unmarshal(lines[len(lines)-1], &whole); err != nil {
		panic(err)
	}
	names := map[string]bool{}
	for _, d := range whole.AWS.CloudWatchMetrics {
		if len(slices.Concat(d.Dimensions...)) > 0 {
			panic("the line for the whole has dimensions")
		}
		for _, m := range d.Metrics {
			names[m.Name] = true
		}
	}
	return names
}

// needed are the failures that must have an alarm, by the metrics that show them.
var needed = []string{
	"RedisUp", "ScrapeError", "QueuesLeftOut", "RedisMemoryPercent", "RedisEvictedTotal", "RedisEvictionUnsafe", "RedisSaveFailed", "ClockSkew",
	"Unserved", "ConsumersStuck", "ConsumersStale", "SinceLastRun", "OldestDueAge", "BacklogRatio", "FailedTotal", "SucceededTotal", "NoHandlerTotal",
	"ScrapeDuration", "TasksDue", "LargestShard", "LateTotal", "TasksDead", "Unreconciled",
	"BuriedTotal", "LostLeasesTotal", "MissingTotal", "UnconfirmedTasks", "DriftTotal", "RepairedTotal", "SinceReconcile", "QuarantinedTotal",
	"Errors of WorkerFunction", "Throttles of WorkerFunction", "Errors of ReconcilerFunction", "Throttles of ReconcilerFunction",
	"Errors of MonitorFunction", "Throttles of MonitorFunction",
}

// alarms checks all alarms of the template, and that there is one for each failure.
func (t *template) alarms() {
	a := alarms{template: t, emitted: emitted(), anchors: anchors(), watched: map[string]bool{}}
	for name, r := range t.section("Resources") {
		if asMap(r)["Type"] == "AWS::CloudWatch::Alarm" {
			a.alarm(name, asMap(r))
		}
	}
	for _, metric := range needed {
		if !a.watched[metric] {
			t.bad("no alarm on %s", metric)
		}
	}
	for _, metric := range []string{"RedisUp", "ScrapeError"} {
		if !a.watched["no "+metric] {
			t.bad("no alarm goes off when %s is missing", metric)
		}
	}
}

type alarms struct {
	*template
	emitted map[string]bool
	anchors map[string]bool
	watched map[string]bool
}

var (
	runbook   = regexp.MustCompile(` https://github\.com/delayq/toolkit/blob/main/docs/runbook\.md#([a-z0-9-]+)$`)
	metricID  = regexp.MustCompile(`\b[a-z][a-zA-Z0-9_]*\b`)
	metricFun = regexp.MustCompile(`\b[A-Z]+\b`)
)

// anchors are those of the runbook's sections, as GitHub makes them.
func anchors() map[string]bool {
	text, err := os.ReadFile("../docs/runbook.md")
	if err != nil {
		panic(err)
	}
	found := map[string]bool{}
	for line := range strings.Lines(string(text)) {
		if heading, ok := strings.CutPrefix(strings.TrimLeft(line, "#"), " "); ok && strings.HasPrefix(line, "##") {
			found[strings.ReplaceAll(strings.ToLower(strings.TrimSpace(heading)), " ", "-")] = true
		}
	}
	return found
}

func (a *alarms) alarm(name string, r map[string]any) {
	bad := func(format string, args ...any) { a.bad(name+": "+format, args...) }
	p := asMap(r["Properties"])
	for key := range p {
		if !slices.Contains([]string{
			"AlarmActions", "AlarmDescription", "ComparisonOperator", "DatapointsToAlarm", "Dimensions", "EvaluationPeriods", "MetricName",
			"Metrics", "Namespace", "OKActions", "Period", "Statistic", "Threshold", "TreatMissingData",
		}, key) {
			bad("unknown property %s", key)
		}
	}
	if m := runbook.FindStringSubmatch(fmt.Sprint(p["AlarmDescription"])); m == nil || !a.anchors[m[1]] {
		bad("AlarmDescription does not end with a section of the runbook: %v", p["AlarmDescription"])
	}
	for _, actions := range []string{"AlarmActions", "OKActions"} {
		if got := fmt.Sprint(p[actions]); got != "map[Fn::If:[HasAlarmTopic [map[Ref:AlarmTopicArn]] map[Ref:AWS::NoValue]]]" {
			bad("%s is %s: want the topic, if there is one", actions, got)
		}
	}
	if op := p["ComparisonOperator"]; op != "GreaterThanThreshold" && op != "LessThanThreshold" {
		bad("ComparisonOperator %v", op)
	}
	switch p["Threshold"].(type) {
	case int, float64:
	default:
		bad("Threshold %v", p["Threshold"])
	}
	if missing := p["TreatMissingData"]; missing != "breaching" && missing != "notBreaching" {
		bad("TreatMissingData %v: want breaching, or notBreaching where another alarm tells that nothing is known", missing)
	}
	periods, _ := p["EvaluationPeriods"].(int)
	if of, ok := p["DatapointsToAlarm"].(int); periods < 1 || ok && (of < 1 || of > periods) {
		bad("%v of %v periods", p["DatapointsToAlarm"], p["EvaluationPeriods"])
	}
	var metrics []string
	if p["Metrics"] != nil {
		metrics = a.math(name, p, periods)
	} else {
		metrics = []string{a.metric(name, p, p["Statistic"], p["Period"], periods)}
		if strings.HasSuffix(metrics[0], "Total") {
			bad("%s only rises: compare its growth", metrics[0])
		}
	}
	ledger := []string{"UnconfirmedTasks", "DriftTotal", "RepairedTotal", "SinceReconcile", "QuarantinedTotal", "Unreconciled"}
	for _, m := range metrics {
		a.watched[m] = true
		if p["TreatMissingData"] == "breaching" {
			a.watched["no "+m] = true
		}
		if slices.Contains(ledger, m) && r["Condition"] != "HasDatabase" {
			bad("%s is there with a database only", m)
		}
	}
}

// metric checks one metric, and returns its name.
func (a *alarms) metric(alarm string, m map[string]any, stat, period any, periods int) string {
	bad := func(format string, args ...any) { a.bad(alarm+": "+format, args...) }
	seconds, _ := period.(int)
	if seconds < 60 || seconds%60 != 0 || seconds*periods > 24*60*60 {
		bad("%d periods of %v s", periods, period)
	}
	name := fmt.Sprint(m["MetricName"])
	if m["Namespace"] == "AWS/Lambda" {
		dimensions, _ := m["Dimensions"].([]any)
		if len(dimensions) != 1 || asMap(dimensions[0])["Name"] != "FunctionName" || name != "Errors" && name != "Throttles" || stat != "Sum" {
			bad("%s of AWS/Lambda, by %v of %v", name, stat, dimensions)
			return name
		}
		of := fmt.Sprint(asMap(asMap(dimensions[0])["Value"])["Ref"])
		if asMap(a.section("Resources")[of])["Type"] != "AWS::Serverless::Function" {
			bad("%s of %s, which is no function", name, of)
		}
		return name + " of " + of
	}
	written := asMap(asMap(asMap(asMap(a.section("Resources")["MonitorFunction"])["Properties"])["Environment"])["Variables"])["DELAYQ_METRICS_NAMESPACE"]
	if got, want := fmt.Sprint(m["Namespace"]), fmt.Sprint(written); got != want {
		bad("namespace %s: the monitor writes to %s", got, want)
	}
	if m["Dimensions"] != nil {
		bad("%s has dimensions: what is known of all queues has none", name)
	}
	if !a.emitted[name] {
		bad("the monitor writes no metric %s", name)
	}
	if stat != "Maximum" && stat != "Minimum" && stat != "SampleCount" {
		bad("%s by %v: want the worst look of a period", name, stat)
	}
	return name
}

// math checks an alarm on an expression, and returns the metrics in it.
func (a *alarms) math(alarm string, p map[string]any, periods int) (metrics []string) {
	bad := func(format string, args ...any) { a.bad(alarm+": "+format, args...) }
	parts, _ := p["Metrics"].([]any)
	var expression string
	byID := map[string]string{}
	for _, part := range parts {
		m := asMap(part)
		if e, ok := m["Expression"].(string); ok {
			if expression != "" || m["ReturnData"] != true {
				bad("want one expression, and that its result is looked at")
			}
			expression = e
			continue
		}
		if m["ReturnData"] != false {
			bad("%v: ReturnData is %v", m["Id"], m["ReturnData"])
		}
		stat := asMap(m["MetricStat"])
		byID[fmt.Sprint(m["Id"])] = a.metric(alarm, asMap(stat["Metric"]), stat["Stat"], stat["Period"], periods)
	}
	used := map[string]bool{}
	for _, id := range metricID.FindAllString(expression, -1) {
		if used[id] = true; byID[id] == "" {
			bad("%s: no metric %s", expression, id)
		}
	}
	for _, f := range metricFun.FindAllString(expression, -1) {
		if f != "IF" && f != "DIFF" {
			bad("%s: function %s", expression, f)
		}
	}
	for id, name := range byID {
		if !used[id] {
			bad("%s is not in %s", id, expression)
		}
		grown := strings.Count(expression, "DIFF("+id+")")
		if strings.HasSuffix(name, "Total") && grown != len(regexp.MustCompile(`\b`+id+`\b`).FindAllString(expression, -1)) {
			bad("%s: %s only rises: compare its growth", expression, name)
		}
		metrics = append(metrics, name)
	}
	if strings.Contains(expression, "DIFF(") && (periods < 2 || p["DatapointsToAlarm"] != 1) {
		bad("a difference needs two periods, and is known of one")
	}
	return metrics
}

// urls checks that nobody gets at a function without a token or a signature.
func (t *template) urls() {
	open := map[string]bool{}
	resources := t.section("Resources")
	variables := func(function string) map[string]any {
		return asMap(asMap(asMap(asMap(resources[function])["Properties"])["Environment"])["Variables"])
	}
	for name, r := range resources {
		p := asMap(asMap(r)["Properties"])
		if asMap(r)["Type"] != "AWS::Lambda::Url" {
			continue
		}
		target, _ := asMap(p["TargetFunctionArn"])["Fn::GetAtt"].([]any)
		if len(target) != 2 || p["AuthType"] != "AWS_IAM" && p["AuthType"] != "NONE" {
			t.bad("%s: AuthType %v of %v", name, p["AuthType"], p["TargetFunctionArn"])
			continue
		}
		function := fmt.Sprint(target[0])
		if p["AuthType"] == "NONE" {
			if asMap(r)["Condition"] != "HasMonitorToken" || variables(function)["DELAYQ_MONITOR_TOKEN"] == nil {
				t.bad("%s: open to all, and %s asks for no token", name, function)
			}
			open[function] = true
		}
		if asMap(asMap(asMap(resources[function])["Properties"])["Events"]) != nil {
			t.bad("%s: strangers could take the place of the ticks of %s", name, function)
		}
	}
	for name, r := range resources {
		p := asMap(asMap(r)["Properties"])
		if asMap(r)["Type"] != "AWS::Lambda::Permission" {
			continue
		}
		byURL := p["Action"] == "lambda:InvokeFunctionUrl" && p["FunctionUrlAuthType"] == "NONE" ||
			p["Action"] == "lambda:InvokeFunction" && p["InvokedViaFunctionUrl"] == true
		if function := fmt.Sprint(asMap(p["FunctionName"])["Ref"]); !open[function] || !byURL || p["Principal"] != "*" {
			t.bad("%s: %v may %v %s other than by its URL", name, p["Principal"], p["Action"], function)
		}
	}
}

// Each line breaks an alarm in one way, and must be noticed for that reason.
func TestAlarmRulesBite(t *testing.T) {
	text, err := os.ReadFile(templatePath)
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct{ name, old, new, want string }{
		{"a metric nobody writes", "MetricName: OldestDueAge", "MetricName: OldestAge", "the monitor writes no metric OldestAge"},
		{"no alarm on it", "MetricName: BacklogRatio", "MetricName: OldestDueAge", "no alarm on BacklogRatio"},
		{"another namespace", "Namespace: !Sub \"delayq/${AWS::StackName}\"", "Namespace: delayq", "the monitor writes to"},
		{"a monitor that writes elsewhere", "DELAYQ_METRICS_NAMESPACE: !Sub \"delayq/${AWS::StackName}\"", "DELAYQ_METRICS_NAMESPACE: x", "the monitor writes to x"},
		{"a dimension", "      MetricName: BacklogRatio", "      MetricName: BacklogRatio\n      Dimensions: [{Name: Queue, Value: orders}]", "BacklogRatio has dimensions"},
		{"no runbook", "docs/runbook.md#delayqunserved", "docs/runbook.md", "AlarmDescription does not end"},
		{"no such section", "runbook.md#delayqunserved", "runbook.md#delayqunserviced", "AlarmDescription does not end"},
		{"nobody is told", "      AlarmActions: !If [HasAlarmTopic, [!Ref AlarmTopicArn], !Ref AWS::NoValue]\n", "", "AlarmActions is <nil>"},
		{"missing data ignored", "TreatMissingData: breaching", "TreatMissingData: notBreaching", "no alarm goes off when RedisUp is missing"},
		{"missing data by default", "      TreatMissingData: notBreaching\n", "", "TreatMissingData <nil>"},
		{"a total as it is", "Expression: \"DIFF(buried)\"", "Expression: \"buried\"", "BuriedTotal only rises"},
		{"a total by itself", "MetricName: OldestProcessingAge", "MetricName: BuriedTotal", "BuriedTotal only rises"},
		{"the sum of looks", "Stat: Maximum", "Stat: Sum", "want the worst look"},
		{"the average of looks", "Statistic: Maximum", "Statistic: Average", "want the worst look"},
		{"a difference of one number", "      EvaluationPeriods: 2\n      DatapointsToAlarm: 1\n", "      EvaluationPeriods: 1\n", "a difference needs two periods"},
		{"an expression of nothing", "DIFF(drift) - DIFF(repaired)", "DIFF(drift) - DIFF(mended)", "no metric mended"},
		{"an unknown function", "DIFF(drift) - DIFF(repaired)", "DIFF(drift) - DELTA(repaired)", "function DELTA"},
		{"a short period", "      Period: 60\n", "      Period: 10\n", "periods of 10 s"},
		{"a threshold of words", "Threshold: 0.5", "Threshold: half", "Threshold half"},
		{"a misspelt property", "ComparisonOperator: LessThan", "Comparison: LessThan", "unknown property Comparison"},
		{"alarms of a ledger that is not there", "    Type: AWS::CloudWatch::Alarm\n    Condition: HasDatabase\n", "    Type: AWS::CloudWatch::Alarm\n", "with a database only"},
		{"a function nobody watches", "      MetricName: Throttles\n      Dimensions:\n        - Name: FunctionName\n          Value: !Ref WorkerFunction", "      MetricName: Throttles\n      Dimensions:\n        - Name: FunctionName\n          Value: !Ref MonitorFunction", "no alarm on Throttles of WorkerFunction"},
		{"no function", "          Value: !Ref WorkerFunction", "          Value: !Ref WorkerLogGroup", "which is no function"},
		{"a URL without a token", "          DELAYQ_MONITOR_TOKEN: !Sub", "          DELAYQ_TOKEN: !Sub", "asks for no token"},
		{"a URL for all without one", "    Type: AWS::Lambda::Url\n    Condition: HasMonitorToken\n", "    Type: AWS::Lambda::Url\n", "open to all"},
		{"a URL without an answer to who", "AuthType: NONE\n      TargetF", "AuthType: SOME\n      TargetF", "AuthType SOME"},
		{"a URL of the ticks", "TargetFunctionArn: !GetAtt MetricsFunction.Arn", "TargetFunctionArn: !GetAtt MonitorFunction.Arn", "take the place of the ticks"},
		{"all may call the worker", "      FunctionName: !Ref MetricsFunction", "      FunctionName: !Ref WorkerFunction", "other than by its URL"},
		{"all may call by the API", "      InvokedViaFunctionUrl: true\n", "", "other than by its URL"},
		{"a token in the open", "!Sub \"{{resolve:secretsmanager:${MonitorTokenSecretArn}}}\"", "hunter2hunter2hunter2", "DELAYQ_MONITOR_TOKEN does not come from a secret store"},
		{"a monitor that is cut short", "      # A look takes 5 seconds at most.\n      Timeout: 30", "      Timeout: 8", "Timeout 8s: want 15s to a tick"},
		{"a monitor that outlives its tick", "      # A look takes 5 seconds at most.\n      Timeout: 30", "      Timeout: 300", "Timeout 5m0s: want 15s to a tick"},
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
