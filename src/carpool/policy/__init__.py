"""The public path of policies, a shim for `carpool.engine.policy`."""

from carpool.engine.policy import *  # noqa: F403
from carpool.engine.policy import __all__ as __all__
