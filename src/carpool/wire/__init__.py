"""Public paths of the wire, a shim for `carpool.engine.wire`."""
