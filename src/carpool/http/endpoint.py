"""One service as an app serves it: its life, its formats, and whether it could answer now."""

from __future__ import annotations

from typing import TYPE_CHECKING

from carpool.engine.allowance import Allowance
from carpool.engine.clock import monotonic
from carpool.engine.core.roster import PlaceState
from carpool.engine.drive.output import LineSink
from carpool.engine.logger import logger
from carpool.http.addresses import addresses_of
from carpool.http.codec import Formats
from carpool.http.trial import try_first_example
from carpool.service.graph import firsts_of
from carpool.service.key import header_of
from carpool.service.weigh import weigher_of

if TYPE_CHECKING:
    from carpool.engine.drive.aio import Driver
    from carpool.engine.observe.snapshot import ServiceSnapshot
    from carpool.model import Traits
    from carpool.service.elsewhere import Elsewhere
    from carpool.service.handle import AsyncHandle
    from carpool.service.join import Join
    from carpool.service.service import Service

_CHECK_TIMEOUT_S = 5.0


class Endpoint:
    """A service as an app serves it.

    Args:
        service: The declaration of the service.
        output: What to do with each line that a worker prints.
        join: Where its workers join; None if none do.
        on: Where its worker processes run; None for this machine.
        is_first: Whether the service is the first one of its app.

    Attributes:
        name: The service's name.
        addresses: Where it can be asked.
        formats: Which formats its model reads and writes.
        weigher: Weighs its items; None if each counts for one.
        key_header: The header whose value requests must have in common to share a batch; None for
            none.
        handle: The running service; None until it is started.
        driver: Takes the service's requests; None until it is started.
        checked_at: When an example last ran through the service.
        is_first: Whether it answers where no model is named, such as at `/predict`.
        is_leaving: Whether the service is being removed, and only answers what is inside.
    """

    def __init__(
        self, service: Service, output: LineSink, join: Join | None, on: Elsewhere | None, *, is_first: bool
    ) -> None:
        self.service = service
        self._join = join
        self._on = on
        self.output = output
        self.name = service.name
        self.is_first = is_first
        self.addresses = list(addresses_of(service, is_first=is_first))
        self.formats = Formats(service.takes, service.gives)
        self.weigher = weigher_of(service.first)
        self.key_header = None if service.first is None else header_of(service.first.key)
        self.handle: AsyncHandle | None = None
        self.driver: Driver | None = None
        self.checked_at = 0.0
        self.is_leaving = False

    async def start(self) -> None:
        """Start the service; when this returns, its workers have run the examples."""
        self.handle = self.service.run_async(output=self.output, join=self._join, on=self._on)
        await self.handle.start()
        self.driver = self.handle.driver
        self.checked_at = monotonic()

    async def stop(self, drain: bool) -> None:
        """Stop the service if it was started; with `drain` it answers the requests inside first."""
        if self.handle is not None:
            await self.handle.close(drain)

    def reset(self) -> None:
        """Forget a service that has been stopped, so that it can be started again."""
        self.handle = self.driver = None

    @property
    def takes(self) -> Traits:
        """The traits of the first stage, which gets the items."""
        return self.service.takes

    @property
    def gives(self) -> Traits:
        """The traits of the last stage, which returns the results."""
        return self.service.gives

    def allowance(self, nbytes: int) -> Allowance:
        """Return what may be made of a body of so many bytes: items that the first queue holds."""
        return Allowance(nbytes, min(stage.max_queue_size for stage in firsts_of(self.service.graph)))

    def snapshot(self) -> ServiceSnapshot | None:
        """Return what the service has done so far; None while it is not running."""
        return None if self.driver is None else self.driver.snapshot()

    @property
    def has_failed(self) -> bool:
        """Whether the service cannot answer any more, or is not there for new requests."""
        return self.is_leaving or (self.driver is not None and self.driver.has_failed)

    @property
    def problem(self) -> str | None:
        """Why the service could not answer now; None if it could."""
        if self.driver is None:
            return f"{self.name} is starting"
        if self.driver.has_failed:
            return f"{self.name} has failed"
        for stage in self.driver.stats.stages:
            if stage.roster is not None and stage.roster.failed:
                return f"stage {stage.name} of {self.name} has failed"
            if not stage.workers[PlaceState.READY]:
                return f"stage {stage.name} of {self.name} has no worker that is ready"
        return None

    def is_stale(self, idle_s: float) -> bool:
        """Report whether the last good answer is so long ago that an example should be tried."""
        if self.driver is None or not self.service.takes.examples:
            return False
        return monotonic() - max(self.driver.stats.last_ok_at, self.checked_at) > idle_s

    async def try_example(self) -> str | None:
        """Have an example answered as a client would, and return what is wrong with it, or None."""
        assert self.handle is not None
        try:
            await try_first_example(self.handle, self.service.takes, self.formats, _CHECK_TIMEOUT_S)
        except Exception as error:
            about = {"model": self.name}
            logger.error("model %s no longer answers its example: %s", self.name, error, extra=about)
            return f"{self.name} no longer answers its example"
        self.checked_at = monotonic()
        return None
