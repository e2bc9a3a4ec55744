package main

import (
	"fmt"
	"io"
	"strconv"
	"text/tabwriter"
)

// A Row is one line of the result. Peer and Ratio are missing when there is nothing to compare with, Pass when the
// row has no bar or was left out; Note then says why.
type Row struct {
	Name   string   `json:"name"`
	Metric string   `json:"metric"`
	Delayq *float64 `json:"delayq,omitempty"`
	Peer   *float64 `json:"peer,omitempty"`
	Ratio  *float64 `json:"ratio,omitempty"`
	Bar    string   `json:"bar,omitempty"`
	Pass   *bool    `json:"pass,omitempty"`
	Note   string   `json:"note,omitempty"`
}

func (r Row) missed() bool { return r.Pass != nil && !*r.Pass }

// A bar is what a row has to reach. The zero bar asks for nothing.
type bar struct {
	op    string // "<=" or ">="
	limit float64
}

func atMost(limit float64) bar  { return bar{"<=", limit} }
func atLeast(limit float64) bar { return bar{">=", limit} }

func (b bar) String() string {
	if b.op == "" {
		return ""
	}
	return b.op + " " + strconv.FormatFloat(b.limit, 'g', -1, 64)
}

// verdict is nil without a bar. A value that is not a number reaches none.
func (b bar) verdict(v float64) *bool {
	switch b.op {
	case "<=":
		return new(v <= b.limit)
	case ">=":
		return new(v >= b.limit)
	}
	return nil
}

// compare makes the row of turns taken side by side, judged by their ratio.
func compare(name, metric string, t turns, b bar) Row {
	ratio := t.ratio()
	return Row{
		Name: name, Metric: metric, Delayq: new(median(t.delayq)), Peer: new(median(t.peer)), Ratio: &ratio,
		Bar: b.String(), Pass: b.verdict(ratio),
	}
}

// single makes the row of a value that is judged by itself.
func single(name, metric string, v float64, b bar) Row {
	return Row{Name: name, Metric: metric, Delayq: &v, Bar: b.String(), Pass: b.verdict(v)}
}

func leftOut(name, metric, why string) Row {
	return Row{Name: name, Metric: metric, Note: "left out: " + why}
}

func printTable(w io.Writer, rows []Row) {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "row\tmetric\tdelayq\tpeer\tratio\tbar\tverdict")
	for _, r := range rows {
		verdict := r.Note
		if r.Pass != nil {
			verdict = map[bool]string{true: "pass", false: "MISSED"}[*r.Pass]
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t%s\t%s\n",
			r.Name, r.Metric, number(r.Delayq), number(r.Peer), number(r.Ratio), r.Bar, verdict)
	}
	_ = t.Flush() // who reads it has gone
}

// number prints three digits or more, and never an exponent.
func number(v *float64) string {
	switch {
	case v == nil:
		return "-"
	case *v >= 100 || *v <= -100:
		return strconv.FormatFloat(*v, 'f', 0, 64)
	case *v >= 10 || *v <= -10:
		return strconv.FormatFloat(*v, 'f', 1, 64)
	}
	return strconv.FormatFloat(*v, 'f', 2, 64)
}
