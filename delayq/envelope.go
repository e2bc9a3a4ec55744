package delayq

import (
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"time"
)

// The record of a task in Redis, opaque to the scripts: version, stamp, type with its length, fields of tag, length and bytes up
// to tag 0, then the payload to the end. It is kept short, since every byte waits in memory with the task. A reader skips
// tags it does not know, so a field can be added during a rollout; a change that an old reader must not skip needs a new
// version.
//
// The stamp is 6 bytes of time, ms by the producer's clock, and 6 random bytes. It tells a resent enqueue from a second one
// with the same content.
const (
	envelopeVersion = 1
	stampSize       = 12

	tagEnd = 0
	tagKey = 1
)

var errEnvelope = errors.New("delayq: unreadable task record")

// encode makes the record of t.
func encode(t *Task, now time.Time) []byte {
	var stamp [2 + 8 + 8]byte
	binary.BigEndian.PutUint64(stamp[:], uint64(now.UnixMilli()))
	binary.BigEndian.PutUint64(stamp[8:], rand.Uint64()) // the last two bytes of it are left over
	return encodeStamped(stamp[2:2+stampSize], t.Type, t.Key, t.Payload)
}

// encodeStamped makes the record of a task whose stamp is known: the same bytes each time.
func encodeStamped(stamp []byte, typ, key string, payload []byte) []byte {
	b := make([]byte, 0, 1+stampSize+8+len(typ)+len(key)+len(payload))
	b = append(b, envelopeVersion)
	b = append(b, stamp...)
	b = appendText(b, typ)
	if key != "" {
		b = appendText(append(b, tagKey), key)
	}
	b = append(b, tagEnd)
	return append(b, payload...)
}

func appendText(b []byte, s string) []byte {
	return append(binary.AppendUvarint(b, uint64(len(s))), s...)
}

// decode fills Type, Key, EnqueuedAt and Payload of t. The payload is a part of blob, not a copy.
func decode(blob []byte, t *Task) error {
	if len(blob) < 1+stampSize || blob[0] != envelopeVersion {
		return errEnvelope
	}
	t.stamp = blob[1 : 1+stampSize : 1+stampSize]
	var eight [8]byte
	copy(eight[2:], blob[1:7])
	t.EnqueuedAt = time.UnixMilli(int64(binary.BigEndian.Uint64(eight[:])))
	typ, b, ok := cutText(blob[1+stampSize:])
	if !ok {
		return errEnvelope
	}
	t.Type = string(typ)
	for {
		if len(b) == 0 {
			return errEnvelope
		}
		tag := b[0]
		b = b[1:]
		if tag == tagEnd {
			t.Payload = b
			return nil
		}
		var field []byte
		if field, b, ok = cutText(b); !ok {
			return errEnvelope
		}
		if tag == tagKey {
			t.Key = string(field)
		}
	}
}

// cutText splits off a text with its length in front.
func cutText(b []byte) (text, rest []byte, ok bool) {
	n, w := binary.Uvarint(b)
	if w <= 0 || n > uint64(len(b)-w) {
		return nil, nil, false
	}
	return b[w : w+int(n)], b[w+int(n):], true
}
