package servers

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// A Prometheus is one Prometheus process with a folder of its own.
type Prometheus struct {
	dir    string
	port   int
	cmd    *exec.Cmd
	exited chan struct{}
}

// PromtoolProgram finds the tool that checks and tests rules.
func PromtoolProgram() (string, error) { return onPath("promtool") }

func prometheusProgram() (string, error) { return onPath("prometheus") }

func onPath(name string) (string, error) {
	path, err := exec.LookPath(name)
	if err != nil {
		return "", fmt.Errorf("servers: %s is not on the PATH; install the package prometheus", name)
	}
	return path, nil
}

// StartPrometheus starts one. Config is its configuration file, and files are more by their names, which lie beside it: rules.
func StartPrometheus(config string, files map[string]string) (*Prometheus, error) {
	program, err := prometheusProgram()
	if err != nil {
		return nil, err
	}
	p := &Prometheus{}
	if p.dir, err = os.MkdirTemp("", "delayq-prometheus-"); err != nil {
		return nil, err
	}
	if err = p.write(config, files); err == nil {
		for range portTries {
			if p.port, err = freePort(); err != nil {
				break
			}
			if err = p.launch(program); !errors.Is(err, errAddrInUse) {
				break
			}
		}
	}
	if err != nil {
		p.Stop()
		return nil, err
	}
	return p, nil
}

func (p *Prometheus) write(config string, files map[string]string) error {
	if err := os.WriteFile(filepath.Join(p.dir, "prometheus.yml"), []byte(config), 0o600); err != nil {
		return err
	}
	for name, text := range files {
		if err := os.WriteFile(filepath.Join(p.dir, name), []byte(text), 0o600); err != nil {
			return err
		}
	}
	return nil
}

func (p *Prometheus) launch(program string) error {
	log, err := os.Create(p.logPath())
	if err != nil {
		return err
	}
	defer log.Close()
	cmd := exec.Command(program, "--config.file=prometheus.yml", "--storage.tsdb.path="+filepath.Join(p.dir, "data"),
		"--web.listen-address="+p.Addr())
	cmd.Dir = p.dir
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = dieWithParent()
	exited := make(chan struct{})
	if err := run(cmd, exited); err != nil {
		return fmt.Errorf("servers: %w", err)
	}
	p.cmd, p.exited = cmd, exited
	client := http.Client{Timeout: time.Second}
	for deadline := time.Now().Add(startTimeout); time.Now().Before(deadline); time.Sleep(20 * time.Millisecond) {
		select {
		case <-exited:
			text := p.Log()
			if bytes.Contains(bytes.ToLower([]byte(text)), []byte(errAddrInUse.Error())) {
				return fmt.Errorf("servers: port %d: %w", p.port, errAddrInUse)
			}
			return fmt.Errorf("servers: prometheus ended at its start:\n%s", text)
		default:
		}
		if r, err := client.Get(p.URL() + "/-/ready"); err == nil {
			r.Body.Close()
			if r.StatusCode == http.StatusOK {
				return nil
			}
		}
	}
	return fmt.Errorf("servers: prometheus not ready in time:\n%s", p.Log())
}

func (p *Prometheus) logPath() string { return filepath.Join(p.dir, "prometheus.log") }

// Addr is its host:port.
func (p *Prometheus) Addr() string { return net.JoinHostPort("127.0.0.1", strconv.Itoa(p.port)) }

// URL is where it is served, without a slash at the end.
func (p *Prometheus) URL() string { return "http://" + p.Addr() }

// Log is everything that it has printed.
func (p *Prometheus) Log() string {
	text, err := os.ReadFile(p.logPath())
	if err != nil {
		return err.Error()
	}
	return strings.TrimSpace(string(text))
}

// Stop kills it and removes its folder. It may be called twice.
func (p *Prometheus) Stop() {
	if p.cmd != nil {
		_ = p.cmd.Process.Kill() // it may have ended
		<-p.exited
	}
	_ = os.RemoveAll(p.dir) // a leftover in the temporary directory harms nobody
}
