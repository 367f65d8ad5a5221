"""Which accelerators each worker process of a stage may see. This module only decides; it reads
nothing itself.

CUDA counts only the devices that `CUDA_VISIBLE_DEVICES` names, and counts them anew from 0. So a
worker that sees one device finds it as `cuda:0`, whatever its number is on the machine.
"""

from __future__ import annotations

import itertools
import operator
import re
from collections.abc import Sequence
from typing import Any

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"

Devices = int | Sequence[int | str | Sequence[int | str]]
"""What `devices=` of a stage takes: how many there are, or a list with one device, or a list of
devices, for each worker.
"""

_NUMBER_OR_UUID = re.compile("[0-9]+|(GPU|MIG)-[0-9A-Za-z/-]+")


def parse_devices(devices: Any) -> tuple[str, ...]:
    """Return the entries of `devices=`, each as `CUDA_VISIBLE_DEVICES` names it.

    Raises:
        ValueError: There is none, or one of them cannot be a device.
        TypeError: It is neither a number nor a list.
    """
    if (count := _whole(devices)) is not None:
        if count < 1:
            raise ValueError(f"devices must be at least 1, not {count}: leave it out where there is none")
        return tuple(map(str, range(count)))
    if isinstance(devices, str | bytes) or not isinstance(devices, Sequence):
        raise TypeError(f'devices must be how many there are, or a list such as ["cuda:0", "cuda:1"], not {devices!r}')
    if not devices:
        raise ValueError("devices is an empty list: leave it out where there is none")
    return tuple(_parse(entry) for entry in devices)


def share_devices(devices: Sequence[str], workers: int) -> tuple[str, ...]:
    """Return the device of each worker, one after the other and from the first one again.

    Raises:
        ValueError: There are more devices than workers.
    """
    if len(devices) > workers:
        raise ValueError(
            f"devices has {len(devices)} entries for {workers} {'worker' if workers == 1 else 'workers'}, so some would"
            " never be used: have a worker for each device, or give a worker several devices as a list, such as"
            ' devices=[["cuda:0", "cuda:1"]]'
        )
    return tuple(itertools.islice(itertools.cycle(devices), workers))


def among_visible(devices: Sequence[str], exported: str | None) -> tuple[str, ...]:
    """Return the devices of each worker as the machine numbers them.

    Args:
        devices: For each worker, what it is to see of the devices that this process sees.
        exported: `CUDA_VISIBLE_DEVICES` of this process; None if it sees all that there are.

    Raises:
        ValueError: This process does not see one of them.
    """
    if exported is None:
        return tuple(devices)
    visible = [name.strip() for name in exported.split(",")]
    visible = list(itertools.takewhile(_can_be_device, visible))  # as CUDA does: what follows a wrong name is hidden
    return tuple(",".join(_mapped(name, visible, exported) for name in each.split(",")) for each in devices)


def _mapped(name: str, visible: Sequence[str], exported: str) -> str:
    if not name.isdigit():
        return name  # a UUID is the same everywhere
    if int(name) >= len(visible):
        seen = {0: "no device", 1: "one device, cuda:0"}.get(len(visible), f"cuda:0 to cuda:{len(visible) - 1}")
        raise ValueError(
            f"devices asks for cuda:{name}, but {VISIBLE_DEVICES}={exported!r} is exported, so that this process"
            f" sees {seen}"
        )
    return visible[int(name)]


def _parse(entry: Any) -> str:
    """Return a device, or a list of devices, as `CUDA_VISIBLE_DEVICES` names it."""
    if isinstance(entry, Sequence) and not isinstance(entry, str | bytes):
        if not entry:
            raise ValueError("devices gives a worker an empty list: name at least one device for each")
        return ",".join(_parse_one(each) for each in entry)
    if isinstance(entry, str):
        return ",".join(map(_parse_one, entry.split(",")))
    return _parse_one(entry)


def _parse_one(device: Any) -> str:
    number = _whole(device)
    name = device.removeprefix("cuda:") if isinstance(device, str) else str(number)
    if not _can_be_device(name):
        raise ValueError(
            f'devices: {device!r} is no device: give its number, "cuda:0" or a UUID such as "GPU-8932f937"'
        )
    return str(int(name)) if name.isdigit() else name


def _can_be_device(name: str) -> bool:
    return _NUMBER_OR_UUID.fullmatch(name) is not None


def _whole(value: Any) -> int | None:
    """Return a whole number as an int; None for anything else, True and False included."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None
