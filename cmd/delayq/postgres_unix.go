//go:build unix

package main

import (
	"os"
	"path/filepath"

	"github.com/delayq/toolkit/scripts/servers"
)

// startPostgres starts a PostgreSQL that nobody else uses and that is gone when it is stopped. missing says that this machine does
// not have its programs.
func startPostgres() (url string, stop func(), missing bool, err error) {
	dir, err := servers.PostgresPrograms()
	if err == nil {
		_, err = os.Stat(filepath.Join(dir, "initdb")) // the environment may name any folder
	}
	if err != nil {
		return "", nil, true, err
	}
	server, err := servers.StartPostgres(servers.PostgresOptions{})
	if err != nil {
		return "", nil, false, err
	}
	return server.URL(""), server.Stop, false, nil
}
