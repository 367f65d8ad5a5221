"""The limit for 6 MB: one process sends a buffer over a socket pair, another receives it.

    python -m bench.peers.servers.socket_copy SECONDS

prints seconds per transfer as JSON. Both buffers are used again each time and nothing is packed or
allocated, so a transfer between workers cannot be faster than this over a socket.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from statistics import median

SIZE = 6_000_000
# A fifth faster than with the system's default of 208 KiB, and more brings nothing; the kernel may
# grant less.
SOCKET_BUFFER = 2**20


def receive(descriptor: int) -> None:
    """The other process: answer each full buffer with one byte."""
    with socket.socket(fileno=descriptor) as connection:
        buffer = memoryview(bytearray(SIZE))
        while True:
            got = 0
            while got < SIZE:
                count = connection.recv_into(buffer[got:])
                if count == 0:
                    return
                got += count
            connection.sendall(b"!")


def seconds_per_transfer(seconds: float) -> float:
    ours, theirs = socket.socketpair()
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER)
    command = [sys.executable, "-m", "bench.peers.servers.socket_copy", "--receive", str(theirs.fileno())]
    with ours, subprocess.Popen(command, pass_fds=[theirs.fileno()]) as receiver:
        theirs.close()
        buffer = bytes(SIZE)
        transfer(ours, buffer)  # the receiver is up, its pages are touched
        taken = []
        deadline = time.perf_counter() + seconds
        while (begin := time.perf_counter()) < deadline:
            transfer(ours, buffer)
            taken.append(time.perf_counter() - begin)
        ours.shutdown(socket.SHUT_RDWR)
        receiver.wait()
    return median(taken)


def transfer(connection: socket.socket, buffer: bytes) -> None:
    connection.sendall(buffer)
    if connection.recv(1) != b"!":
        raise ConnectionError("the receiver has gone")


if __name__ == "__main__":
    if sys.argv[1] == "--receive":
        receive(int(sys.argv[2]))
    else:
        print(json.dumps({"seconds_per_item": seconds_per_transfer(float(sys.argv[1]))}))
