package delayq

import "strconv"

// keysOf returns every Redis key of one shard of a queue, in the fixed order in which all scripts get them (lua/README.md).
// The braces pin them to one slot, so a shard works on a cluster; nothing else in the module builds a key name.
func keysOf(queue string, shard int) []string {
	p := "dq:{" + queue + ":" + strconv.Itoa(shard) + "}:"
	return []string{
		p + "pending", p + "processing", p + "dead", p + "tasks", p + "state",
		p + "done:0", p + "done:1", p + "errors", p + "meta", p + "req", p + "consumers", p + "revs",
		p + "beats",
	}
}

// Places in the slice of keysOf that Go code reads itself.
const (
	keyPending    = 0
	keyProcessing = 1
	keyDead       = 2
	keyTasks      = 3
	keyState      = 4
	keyErrors     = 7
	keyMeta       = 8
	keyConsumers  = 10
	keyRevs       = 11
	keyBeats      = 12
)

// shardOf maps an id to a shard by FNV-1a: stable for ever, since moving ids between shards would lose them.
func shardOf(id string, shards int) int {
	if shards == 1 {
		return 0
	}
	h := uint64(14695981039346656037)
	for i := range len(id) {
		h = (h ^ uint64(id[i])) * 1099511628211
	}
	return int((h ^ h>>32) % uint64(shards))
}
