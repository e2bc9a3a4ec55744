package monitor_test

import (
	"encoding/json"
	"net/url"
	"os"
	"regexp"
	"strings"
	"testing"
)

type dashboard struct {
	Panels      []panel `json:"panels"`
	Annotations struct {
		List []struct {
			Name string `json:"name"`
			Expr string `json:"expr"`
		} `json:"list"`
	} `json:"annotations"`
	Templating struct {
		List []struct {
			Name  string          `json:"name"`
			Type  string          `json:"type"`
			Query json.RawMessage `json:"query"`
		} `json:"list"`
	} `json:"templating"`
}

type panel struct {
	ID         int                  `json:"id"`
	Type       string               `json:"type"`
	Title      string               `json:"title"`
	Datasource struct{ UID string } `json:"datasource"`
	GridPos    struct{ X, W int }   `json:"gridPos"`
	Targets    []struct {
		RefID        string               `json:"refId"`
		Datasource   struct{ UID string } `json:"datasource"`
		Expr         string               `json:"expr"`
		LegendFormat string               `json:"legendFormat"`
	} `json:"targets"`
	FieldConfig struct {
		Defaults struct{ Unit string } `json:"defaults"`
	} `json:"fieldConfig"`
}

func readDashboard(t *testing.T) dashboard {
	t.Helper()
	text, err := os.ReadFile("dashboard.json")
	if err != nil {
		t.Fatal(err)
	}
	var d dashboard
	if err := json.Unmarshal(text, &d); err != nil {
		t.Fatalf("dashboard.json: %v", err)
	}
	return d
}

func TestDashboardShowsAllThatIsExported(t *testing.T) {
	t.Parallel()
	known, shown, ids := exported(t), map[string]bool{}, map[int]bool{}
	for _, p := range readDashboard(t).Panels {
		if p.Title == "" || ids[p.ID] || p.GridPos.X+p.GridPos.W > 24 {
			t.Errorf("panel %d %q: no title, an id that another has, or wider than the page", p.ID, p.Title)
		}
		ids[p.ID] = true
		if p.Type == "row" {
			continue
		}
		if len(p.Targets) == 0 || p.FieldConfig.Defaults.Unit == "" || p.Datasource.UID != "${datasource}" {
			t.Errorf("panel %q: no query, no unit, or another data source than the chosen one", p.Title)
		}
		for _, target := range p.Targets {
			if target.Datasource.UID != "${datasource}" {
				t.Errorf("panel %q, %s: data source %q", p.Title, target.RefID, target.Datasource.UID)
			}
			for _, name := range metricName.FindAllString(target.Expr, -1) {
				if shown[name] = true; !known[name] {
					t.Errorf("panel %q reads %s, which the collector does not export", p.Title, name)
				}
			}
		}
	}
	for name := range known {
		if !shown[name] && !shown[name+"_bucket"] && name != "push_time_seconds" {
			t.Errorf("no panel shows %s", name)
		}
	}
}

var (
	labelValues = regexp.MustCompile(`^label_values\((\w+), (\w+)\)$`)
	legendLabel = regexp.MustCompile(`{{(\w+)}}`)
	variable    = regexp.MustCompile(`\$\w+|\$\{`)
)

// dashboardIsAnswered asks a Prometheus everything that the dashboard asks, as Grafana does, while a queue is at work.
func dashboardIsAnswered(t *testing.T, s *scene) {
	d := readDashboard(t)
	variables := map[string]bool{}
	for _, v := range d.Templating.List {
		variables[v.Name+" "+v.Type] = true
		var q struct{ Query string }
		if v.Type != "query" || json.Unmarshal(v.Query, &q) != nil {
			continue
		}
		parts := labelValues.FindStringSubmatch(q.Query)
		if parts == nil {
			t.Fatalf("variable %s: the query %q is not one that this test knows", v.Name, q.Query)
		}
		var values []string
		s.ask(t, "/api/v1/label/"+parts[2]+"/values?match[]="+url.QueryEscape(parts[1]), &values)
		if len(values) != 1 || values[0] != s.queue.Name() {
			t.Errorf("variable %s: %v, want %s", v.Name, values, s.queue.Name())
		}
	}
	if !variables["datasource datasource"] || !variables["queue query"] {
		t.Errorf("variables: %v, want a data source and a queue", variables)
	}
	for _, a := range d.Annotations.List {
		if a.Expr != "" {
			s.rangeOf(t, "annotation "+a.Name, a.Expr)
		}
	}
	for _, chosen := range []string{s.queue.Name(), ".+"} { // as Grafana fills in one queue, and all
		fill := strings.NewReplacer("$queue", chosen, "$__rate_interval", "20s")
		for _, p := range d.Panels {
			for _, target := range p.Targets {
				expr := fill.Replace(target.Expr)
				if left := variable.FindString(expr); left != "" {
					t.Errorf("panel %q: there is no variable %s", p.Title, left)
				}
				series := s.rangeOf(t, p.Title, expr)
				if !hasNumber(series) {
					t.Errorf("panel %q has nothing to show, with queue %s: %s", p.Title, chosen, expr)
					continue
				}
				for _, label := range legendLabel.FindAllStringSubmatch(target.LegendFormat, -1) {
					if series[0].Metric[label[1]] == "" {
						t.Errorf("panel %q: the legend %q wants a label that %v lacks", p.Title, target.LegendFormat, series[0].Metric)
					}
				}
			}
		}
	}
}

func hasNumber(series []promSeries) bool {
	for _, one := range series {
		for _, v := range one.Values {
			if text, _ := v[1].(string); text != "NaN" && !strings.HasSuffix(text, "Inf") {
				return true
			}
		}
	}
	return false
}
