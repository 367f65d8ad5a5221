"""Tells systemd that the server is up, goes down, or is still alive (sd_notify), if it asks."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket

_MICROSECONDS = 1e6


def notify(state: str) -> None:
    """Tell systemd a state, such as `READY=1`; without systemd, or if it has gone, nobody."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    if address.startswith("@"):  # a name in the abstract name space
        address = "\0" + address[1:]
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
        sock.sendto(state.encode(), address)


def watchdog_s() -> float | None:
    """Return how often systemd wants to hear that we are alive, in seconds; None for never."""
    if os.environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return None
    text = os.environ.get("WATCHDOG_USEC", "")
    return int(text) / _MICROSECONDS / 2 if text.isdigit() and int(text) else None


async def keep_alive() -> None:
    """Tell systemd again and again that this loop turns, until cancelled."""
    every_s = watchdog_s()
    while every_s is not None:
        notify("WATCHDOG=1")
        await asyncio.sleep(every_s)
