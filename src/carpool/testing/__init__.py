"""For tests of programs that use carpool, and of parts that are put into it: faults, virtual time, contracts.

* `FaultPlan`, `environment`: faults at exact points of a worker or the server, see `carpool.faults`.
* `VirtualClock`, `VirtualDriver`: the real decisions under a clock that jumps.
* `StubWorker`, `stub_workers`: a worker that speaks the frames, and misbehaves when it is told to.
* `check_policy`, `check_driver`, `check_wire`: does a policy, a driver or a wire of one's own keep its contract?
"""

from carpool.clock import VirtualClock
from carpool.drive.virtual import VirtualDriver
from carpool.faults import ACTIONS, EVERY_PASS, POINTS, FaultPlan, InjectedFault, environment
from carpool.testing.driver import DriverError, check_driver
from carpool.testing.policy import PolicyError, check_policy
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
    "StubWorker",
    "VirtualClock",
    "VirtualDriver",
    "WireError",
    "check_driver",
    "check_policy",
    "check_wire",
    "environment",
    "stub_workers",
]
