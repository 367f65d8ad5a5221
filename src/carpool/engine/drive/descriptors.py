"""The standard descriptors of a program that was started without some of them."""

from __future__ import annotations

import os

_STDERR = 2


def fill_standard() -> None:
    """Open /dev/null in place of each of the descriptors 0, 1 and 2 that is closed.

    Otherwise a socket or a loop's own descriptor would get such a number. Code that prints or reads
    input would then use it, a worker would inherit it as its standard stream, and libuv aborts the
    program rather than close it.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) <= _STDERR:
        os.set_inheritable(fd, True)
    os.close(fd)
