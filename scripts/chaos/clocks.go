package main

import (
	"context"
	_ "embed"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"time"
)

// clockSource is no .c file, which the Go tool would want to compile into this program.
//
//go:embed clock.c.txt
var clockSource []byte

// buildClock compiles the library that moves a server's clock, and returns the file that holds by how much, and the server's
// environment. Only C programs can be moved: Go's own clock does not pass through the C library.
func buildClock(ctx context.Context, dir string) (file string, env []string, err error) {
	file = filepath.Join(dir, "clock")
	source, library := filepath.Join(dir, "clock.c"), filepath.Join(dir, "clock.so")
	if err := os.WriteFile(source, clockSource, 0o600); err != nil {
		return "", nil, err
	}
	compiler := "cc"
	if _, err := exec.LookPath(compiler); err != nil {
		compiler = "gcc"
	}
	if out, err := exec.CommandContext(ctx, compiler, "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl").CombinedOutput(); err != nil {
		return "", nil, fmt.Errorf("the clock library needs a C compiler: %w: %s", err, out)
	}
	return file, []string{"LD_PRELOAD=" + library, "CHAOS_CLOCK=" + file}, setClock(file, 0)
}

// setClock moves the clock of a server that has the library, to d ahead of the machine's.
func setClock(file string, d time.Duration) error {
	f, err := os.OpenFile(file, os.O_CREATE|os.O_WRONLY, 0o600) // the mapping stays with the file: no truncation, no rename
	if err != nil {
		return err
	}
	_, err = f.WriteAt(binary.NativeEndian.AppendUint64(nil, uint64(d.Microseconds())), 0) //nolint:gosec // two's complement is meant
	if err1 := f.Close(); err == nil {
		err = err1
	}
	return err
}

// moveClocks steps Redis' clock back and forth, and lets a server take over that is ahead.
func moveClocks(ctx context.Context, s *stage) error {
	ahead := time.Duration(0)
	set := func(d time.Duration) error {
		s.fault("redis' clock is %s ahead", d)
		ahead = d
		if err := s.step(d); err != nil {
			return err
		}
		now, err := s.rdb.Time(ctx).Result()
		if err == nil && (time.Until(now)-d).Abs() > 5*time.Second {
			return fmt.Errorf("redis does not follow: it is %s ahead, not %s", time.Until(now), d)
		}
		return nil
	}
	for round := 0; s.sleep(ctx, 600*time.Millisecond, 1200*time.Millisecond); round++ {
		var err error
		switch round % 4 {
		case 0:
			err = set(-600 * time.Second)
		case 1:
			err = set(600 * time.Second)
		case 2:
			err = set(0)
		default: // a replica with another clock is promoted: the same data, and suddenly another time
			s.redis.Kill()
			err = errors.Join(set(30*time.Second), s.redis.Restart())
		}
		if err != nil && ctx.Err() == nil {
			return err
		}
	}
	if ahead == 0 {
		return nil
	}
	return s.step(0)
}

// step moves Redis' clock and writes it down.
func (s *stage) step(d time.Duration) error {
	s.j.write(event{Kind: evClock, Delay: d.Microseconds()})
	return setClock(s.clockFile, d)
}
