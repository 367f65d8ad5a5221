"""Tools to test programs that use carpool, and parts for it: faults, checks, virtual time.

* `FaultPlan` and `environment` make faults happen at exact points of a worker or the server, see
  `carpool.engine.faults`.
* `VirtualClock` and `VirtualDriver` make the real decisions under a clock that jumps.
* `check_policy` checks whether a policy keeps its contract.
* `check_batches` checks whether a model gives an item the same answer alone and in company.
* `check_steps` checks whether a model of steps gives its streams in company what they get alone.
* `served` serves a service over HTTP for a test, and gives it a client; `carpool.testing.fixtures`
  has a fixture for pytest that does the same.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from carpool.engine.clock import VirtualClock
    from carpool.engine.drive.virtual import VirtualDriver
    from carpool.engine.faults import ACTIONS, EVERY_PASS, POINTS, FaultPlan, InjectedFault, environment
    from carpool.testing.batches import BatchesError, check_batches
    from carpool.testing.policy import PolicyError, check_policy
    from carpool.testing.serving import served
    from carpool.testing.steps import StepsError, check_steps

__all__ = [
    "ACTIONS",
    "EVERY_PASS",
    "POINTS",
    "BatchesError",
    "FaultPlan",
    "InjectedFault",
    "PolicyError",
    "StepsError",
    "VirtualClock",
    "VirtualDriver",
    "check_batches",
    "check_policy",
    "check_steps",
    "environment",
    "served",
]


_WHERE = {
    "carpool.engine.clock": ["VirtualClock"],
    "carpool.engine.drive.virtual": ["VirtualDriver"],
    "carpool.engine.faults": ["ACTIONS", "EVERY_PASS", "POINTS", "FaultPlan", "InjectedFault", "environment"],
    "carpool.testing.batches": ["BatchesError", "check_batches"],
    "carpool.testing.policy": ["PolicyError", "check_policy"],
    "carpool.testing.steps": ["StepsError", "check_steps"],
}
_MODULES = {name: module for module, names in _WHERE.items() for name in names}


def __dir__() -> list[str]:
    """Return the names for users, which completion then offers."""
    return __all__


def __getattr__(name: str) -> Any:
    """Import each tool at its first use.

    Worker processes import this folder for nothing that runs services; `served` needs
    `carpool[serve,client]`.
    """
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    if name == "served":
        return importlib.import_module("carpool.testing.serving").served
    raise AttributeError(f"module 'carpool.testing' has no attribute {name!r}")
