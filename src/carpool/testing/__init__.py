"""Tools to test programs that use carpool, and parts for it: faults, contracts, virtual time.

* `FaultPlan` and `environment` make faults happen at exact points of a worker or the server, see
  `carpool.faults`.
* `VirtualClock` and `VirtualDriver` make the real decisions under a clock that jumps.
* `StubWorker` and `stub_workers` are workers that speak the frame protocol and misbehave on demand.
* `check_policy`, `check_driver` and `check_wire` check whether a policy, a driver or an
  implementation of the frame protocol keeps its contract.
* `check_steps` checks whether a model of steps gives its streams in company what they get alone.
"""

from carpool.clock import VirtualClock
from carpool.drive.virtual import VirtualDriver
from carpool.faults import ACTIONS, EVERY_PASS, POINTS, FaultPlan, InjectedFault, environment
from carpool.testing.driver import DriverError, check_driver
from carpool.testing.policy import PolicyError, check_policy
from carpool.testing.steps import StepsError, check_steps
from carpool.testing.stub import Misbehaviour, StubWorker, stub_workers
from carpool.testing.wire import WireError, check_wire

__all__ = [
    "ACTIONS",
    "EVERY_PASS",
    "POINTS",
    "DriverError",
    "FaultPlan",
    "InjectedFault",
    "Misbehaviour",
    "PolicyError",
    "StepsError",
    "StubWorker",
    "VirtualClock",
    "VirtualDriver",
    "WireError",
    "check_driver",
    "check_policy",
    "check_steps",
    "check_wire",
    "environment",
    "stub_workers",
]
