//go:build !unix

package main

import "errors"

// Without the signals of Unix dev starts no PostgreSQL of its own; one that runs can be named.
func startPostgres() (url string, stop func(), missing bool, err error) {
	return "", nil, true, errors.New("not on this system")
}
