package monitor_test

import (
	"maps"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/redis/go-redis/v9"
	"gopkg.in/yaml.v3"

	"github.com/delayq/toolkit/monitor"
	"github.com/delayq/toolkit/scripts/servers"
)

const runbookURL = "https://github.com/delayq/toolkit/blob/main/docs/runbook.md#"

type rule struct {
	Alert       string            `yaml:"alert"`
	Record      string            `yaml:"record"`
	Expr        string            `yaml:"expr"`
	For         string            `yaml:"for"`
	Labels      map[string]string `yaml:"labels"`
	Annotations map[string]string `yaml:"annotations"`
}

type ruleFile struct {
	Groups []struct {
		Name  string `yaml:"name"`
		Rules []rule `yaml:"rules"`
	} `yaml:"groups"`
}

type rulesTest struct {
	Tests []struct {
		Name        string `yaml:"name"`
		InputSeries []struct {
			Series string `yaml:"series"`
		} `yaml:"input_series"`
		AlertRuleTest []struct {
			EvalTime  string `yaml:"eval_time"`
			Alertname string `yaml:"alertname"`
			ExpAlerts []any  `yaml:"exp_alerts"`
		} `yaml:"alert_rule_test"`
	} `yaml:"tests"`
}

func readYAML(t *testing.T, file string, into any) {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if err := yaml.Unmarshal(text, into); err != nil {
		t.Fatalf("%s: %v", file, err)
	}
}

func readRules(t *testing.T) (alerts, records map[string]rule) {
	t.Helper()
	var file ruleFile
	readYAML(t, "alerts.yml", &file)
	alerts, records = map[string]rule{}, map[string]rule{}
	for _, g := range file.Groups {
		for _, r := range g.Rules {
			switch _, twice := alerts[r.Alert]; {
			case r.Record != "":
				records[r.Record] = r
			case twice:
				t.Errorf("two alerts are called %s", r.Alert)
			default:
				alerts[r.Alert] = r
			}
		}
	}
	if len(alerts) < 30 {
		t.Fatalf("only %d alerts were read", len(alerts))
	}
	return alerts, records
}

func TestAlertsWithPromtool(t *testing.T) {
	t.Parallel()
	servers.NeedPrometheus(t)
	promtool, err := servers.PromtoolProgram()
	if err != nil {
		t.Fatal(err)
	}
	for _, args := range [][]string{{"check", "rules", "alerts.yml"}, {"test", "rules", "alerts_test.yml"}} {
		out, err := exec.Command(promtool, args...).CombinedOutput()
		if err != nil || !strings.Contains(string(out), "SUCCESS") {
			t.Errorf("promtool %s: %v\n%s", strings.Join(args, " "), err, out)
		}
	}
}

var (
	metricName  = regexp.MustCompile(`\b(?:(?:queue:)?delayq_[a-z0-9_:]+|push_time_seconds)`)
	lessThanAll = regexp.MustCompile(`(?s)\bunless\b.*`)
)

// metricsOf are those that an expression reads, through recording rules down to what is scraped.
func metricsOf(expr string, records map[string]rule) []string {
	seen := map[string]bool{}
	for _, name := range metricName.FindAllString(expr, -1) {
		if r, ok := records[name]; ok {
			for _, m := range metricsOf(r.Expr, records) {
				seen[m] = true
			}
			continue
		}
		seen[name] = true
	}
	return slices.Sorted(maps.Keys(seen))
}

// Each alert must be seen to fire, and seen not to fire on series that it does read: without them no alert fires.
func TestEachAlertIsTested(t *testing.T) {
	t.Parallel()
	alerts, records := readRules(t)
	var tests rulesTest
	readYAML(t, "alerts_test.yml", &tests)
	fires, quiet, series := map[string]int{}, map[string]int{}, map[string]map[string]bool{}
	for _, group := range tests.Tests {
		var input []string
		for _, s := range group.InputSeries {
			input = append(input, metricName.FindString(s.Series))
		}
		for _, c := range group.AlertRuleTest {
			alert, ok := alerts[c.Alertname]
			if !ok {
				t.Errorf("%s: there is no alert %s", group.Name, c.Alertname)
				continue
			}
			if len(c.ExpAlerts) > 0 {
				fires[c.Alertname]++
				continue
			}
			quiet[c.Alertname]++
			for _, m := range metricsOf(lessThanAll.ReplaceAllString(alert.Expr, ""), records) {
				if !slices.Contains(input, m) {
					t.Errorf("%s at %s: %s is quiet because there is no series %s", group.Name, c.EvalTime, c.Alertname, m)
				}
			}
			if series[c.Alertname] == nil {
				series[c.Alertname] = map[string]bool{}
			}
			for _, m := range input {
				series[c.Alertname][m] = true
			}
		}
	}
	for name, alert := range alerts {
		if fires[name] == 0 || quiet[name] == 0 {
			t.Errorf("%s: %d tests in which it fires and %d in which it does not; want one of each at least", name, fires[name], quiet[name])
		}
		for _, m := range metricsOf(alert.Expr, records) {
			if !series[name][m] {
				t.Errorf("%s: none of its tests has a series %s", name, m)
			}
		}
	}
}

// exported are the metrics of the collector, the series of its histograms among them.
func exported(t *testing.T) map[string]bool {
	t.Helper()
	m, err := monitor.New(monitor.Config{Redis: redis.NewClient(&redis.Options{})}) // nothing is dialled
	if err != nil {
		t.Fatal(err)
	}
	descs := make(chan *prometheus.Desc)
	go func() { defer close(descs); m.Collector().Describe(descs) }()
	names := map[string]bool{"push_time_seconds": true} // a Pushgateway's own
	for d := range descs {
		name := metricName.FindString(d.String())
		names[name] = true
		if name == "delayq_lateness_seconds" || name == "delayq_duration_seconds" {
			for _, part := range []string{"_bucket", "_sum", "_count"} {
				names[name+part] = true
			}
		}
	}
	if len(names) < 40 {
		t.Fatalf("the collector describes only %d metrics", len(names))
	}
	return names
}

func TestAlertsReadWhatIsExported(t *testing.T) {
	t.Parallel()
	alerts, records := readRules(t)
	known := exported(t)
	for name, alert := range alerts {
		for _, m := range metricsOf(alert.Expr, records) {
			if !known[m] {
				t.Errorf("%s reads %s, which the collector does not export", name, m)
			}
		}
	}
}

func TestAlertsSayWhatToDo(t *testing.T) {
	t.Parallel()
	alerts, _ := readRules(t)
	sections := runbookSections(t)
	for name, a := range alerts {
		if severity := a.Labels["severity"]; severity != "page" && severity != "ticket" || len(a.Labels) != 1 {
			t.Errorf("%s: labels %v, want severity page or ticket and no more", name, a.Labels)
		}
		if a.Annotations["summary"] == "" || a.Annotations["description"] == "" {
			t.Errorf("%s: no summary or no description", name)
		}
		if got, want := a.Annotations["runbook_url"], runbookURL+strings.ToLower(name); got != want {
			t.Errorf("%s: runbook_url %s, want %s", name, got, want)
		}
		text, ok := sections[name]
		if !ok {
			t.Errorf("%s: no section of that name in docs/runbook.md", name)
			continue
		}
		for _, part := range []string{"**Means**", "**Look**", "**Mend**", "**Harmless**"} {
			if !strings.Contains(text, part) {
				t.Errorf("docs/runbook.md, %s: no part %s", name, part)
			}
		}
	}
	for name := range sections {
		if _, ok := alerts[name]; !ok {
			t.Errorf("docs/runbook.md has a section %s, and there is no such alert", name)
		}
	}
}

var runbookLink = regexp.MustCompile(`\]\(#([^)]*)\)`)

func TestRunbookLinksLeadSomewhere(t *testing.T) {
	t.Parallel()
	sections := runbookSections(t)
	anchors := map[string]bool{}
	for name := range sections {
		anchors[strings.ToLower(name)] = true
	}
	links := 0
	for name, text := range sections {
		for _, link := range runbookLink.FindAllStringSubmatch(text, -1) {
			if links++; !anchors[link[1]] {
				t.Errorf("docs/runbook.md, %s: there is no section #%s", name, link[1])
			}
		}
	}
	if links == 0 {
		t.Error("docs/runbook.md: no links were found")
	}
}

// runbookSections are the texts under the headings that are names of alerts.
func runbookSections(t *testing.T) map[string]string {
	t.Helper()
	text, err := os.ReadFile("../docs/runbook.md")
	if err != nil {
		t.Fatal(err)
	}
	sections := map[string]string{}
	for _, part := range strings.Split(string(text), "\n### ")[1:] {
		heading, body, _ := strings.Cut(part, "\n")
		body, _, _ = strings.Cut(body, "\n## ")
		if _, twice := sections[heading]; twice {
			t.Errorf("docs/runbook.md has two sections %s", heading)
		}
		sections[heading] = body
	}
	return sections
}
