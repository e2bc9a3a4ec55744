package main

import "context"

// A bug is one seeded mistake.
type bug struct{ name, scenario, about string }

var bugs []bug

func sabotageAll(context.Context, *options) error { return nil }
