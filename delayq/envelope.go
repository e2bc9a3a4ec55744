package delayq

import (
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"time"
)

// The record of a task in Redis, opaque to the scripts: version, nonce, then fields of tag, length and bytes up to tag 0,
// then the payload to the end. A reader skips tags it does not know, so a field can be added during a rollout; a change that
// an old reader must not skip needs a new version.
const (
	envelopeVersion = 1
	nonceSize       = 12

	tagEnd      = 0
	tagType     = 1
	tagKey      = 2
	tagEnqueued = 3 // ms by the clock of the producer, for people only
)

var errEnvelope = errors.New("delayq: unreadable task record")

// encode makes the record of t. The nonce is what tells a resent enqueue from a second one with the same content.
func encode(t *Task, now time.Time) []byte {
	b := make([]byte, 1+nonceSize, 1+nonceSize+32+len(t.Type)+len(t.Key)+len(t.Payload))
	b[0] = envelopeVersion
	binary.LittleEndian.PutUint64(b[1:], rand.Uint64())
	binary.LittleEndian.PutUint32(b[9:], rand.Uint32())
	b = appendField(b, tagType, t.Type)
	if t.Key != "" {
		b = appendField(b, tagKey, t.Key)
	}
	b = append(b, tagEnqueued, 8)
	b = binary.LittleEndian.AppendUint64(b, uint64(now.UnixMilli()))
	b = append(b, tagEnd)
	return append(b, t.Payload...)
}

func appendField(b []byte, tag byte, s string) []byte {
	b = append(b, tag)
	b = binary.AppendUvarint(b, uint64(len(s)))
	return append(b, s...)
}

// decode fills Type, Key, EnqueuedAt and Payload of t. The payload is a part of blob, not a copy.
func decode(blob []byte, t *Task) error {
	if len(blob) < 1+nonceSize+1 || blob[0] != envelopeVersion {
		return errEnvelope
	}
	b := blob[1+nonceSize:]
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
		n, w := binary.Uvarint(b)
		if w <= 0 || n > uint64(len(b)-w) {
			return errEnvelope
		}
		field := b[w : w+int(n)]
		b = b[w+int(n):]
		switch tag {
		case tagType:
			t.Type = string(field)
		case tagKey:
			t.Key = string(field)
		case tagEnqueued:
			if len(field) != 8 {
				return errEnvelope
			}
			t.EnqueuedAt = time.UnixMilli(int64(binary.LittleEndian.Uint64(field)))
		}
	}
}
