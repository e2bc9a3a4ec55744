package monitor

import "maps"

// tell logs what cannot be read any more, and what can again: changes only, since scrapes come every few seconds.
func (m *Monitor) tell(v *View) {
	now := map[string]error{"redis": v.Server.Err}
	if v.Server.Err == nil { // else that is all that can be said
		now["list of queues"] = v.FindErr
		for i := range v.Queues {
			now["queue "+v.Queues[i].Name] = v.Queues[i].Err
		}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	maps.DeleteFunc(m.failing, func(what string, _ error) bool { // what is no longer watched
		_, looked := now[what]
		return !looked && v.Server.Err == nil
	})
	for what, err := range now {
		switch before := m.failing[what]; {
		case err != nil && before == nil:
			m.failing[what] = err
			m.cfg.Logger.Warn("monitor: cannot be read", "what", what, "error", err)
		case err == nil && before != nil:
			delete(m.failing, what)
			m.cfg.Logger.Info("monitor: can be read again", "what", what)
		}
	}
}
