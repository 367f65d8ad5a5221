"""The kinds of payloads under their public path, a shim for `carpool.engine.wire.payload`."""

from carpool.engine.wire.payload import JSON as JSON
