"""For all tests."""

from __future__ import annotations

import signal

# A run that a shell has started in the background ignores SIGINT, and so would every server that a test starts.
signal.signal(signal.SIGINT, signal.default_int_handler)
