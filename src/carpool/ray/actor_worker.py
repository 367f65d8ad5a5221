"""A worker that is a Ray actor: Ray places it and says when it has died; frames go over a socket.

Its life:

1. An actor is asked for, in the thread for errands. While the cluster has no room for it, it is
   pending: by that demand Ray's autoscaler adds nodes. If there is room and it does not come, Ray
   may have placed it on a silent node; then another one is asked for, on nodes from which messages
   came.
2. The actor connects to the gate with a token of its own. From then on the worker is a
   `JoinedWorker`, and is lost when its connection ends. An actor dies with its last handle.
3. Ray's word that the actor, or its node, has died ends it as well, whichever comes first. A node
   that sends nothing is a suspect (`session.py`).
"""

from __future__ import annotations

import asyncio
import pickle
import secrets
import socket
from collections.abc import Callable
from functools import partial
from math import inf
from typing import Any

import msgspec

from carpool.engine.drive.gate import Invitation, JoinedWorker
from carpool.engine.drive.worker import Launch
from carpool.engine.foreign import named_text_of
from carpool.engine.logger import logger
from carpool.engine.observe.log import LineSink
from carpool.engine.wire.frame import Frame, FrameKind
from carpool.engine.wire.handshake import Hello
from carpool.engine.worker import own_metrics
from carpool.ray.session import ActorOrder, Placed, Session
from carpool.ray.suspects import SUSPECT_S
from carpool.version import __version__

_LOOK_EVERY_S = 30.0
_PATIENCE_S, _MOST_PATIENCE_S = 8.0, 120.0  # with an actor that does not come though there is room
_TIMES_THE_FASTEST = 4  # so much longer than the fastest may it take
_LAST_WORDS_S = 1.0  # for an actor that hangs, before it is killed
_DEATH_S = 2.0  # within which Ray reports that an actor was killed, if its node is well
_TOKEN_BYTES = 32
_LONGEST_TEXT = 1000


class ActorWorker:
    """One worker on a cluster; see `Worker` in drive/worker.py.

    Args:
        on_lost: Called once, with the cause, when it has ended.
        sink: Not used, as what an actor prints is Ray's.

    Attributes:
        send: Sends it a frame, once it has connected.
        send_ahead: Sends it a large frame while it is busy; None if `send` may do that at once.
    """

    pid: int | None = None

    def __init__(
        self,
        session: Session,
        launch: Launch,
        place: int,
        on_frame: Callable[[Frame], None],
        on_lost: Callable[[str], None],
        sink: LineSink,
    ) -> None:
        self.send: Callable[[Frame], None] = _drop
        self.send_ahead: Callable[[Frame], None] | None = None
        self._session = session
        self._launch = launch
        self._place = place
        self._name = f"{launch.setup.stage}/{place}"
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._ended_because = ""
        self._joined: JoinedWorker | None = None
        self._node = ""
        self._timer: asyncio.TimerHandle | None = None

        # of the actor that was asked for last: which one it is, its handle, the call that it lives
        # in, when it was asked for, and whether it must not be placed on some nodes
        self._ticket = ""
        self._asked_at = 0.0
        self._avoids = False
        self._times_asked = 0
        self._told_at = self._loop.time()  # what is missing, or never
        self._actor: Any = None
        self._call: Any = None
        self._ask()

    # -- what the pool sees

    @property
    def broke_protocol(self) -> bool:
        return self._joined is not None and self._joined.broke_protocol

    @property
    def fell_silent(self) -> bool:
        return self._joined is not None and self._joined.fell_silent

    @property
    def where(self) -> str:
        return "" if self._joined is None else self._joined.where

    @property
    def hello(self) -> Hello | None:
        """Its own greeting; None while it has not connected."""
        return None if self._joined is None else self._joined.hello

    @property
    def has_unread_batch(self) -> bool:
        return self._joined is not None and self._joined.has_unread_batch

    def close_input(self) -> None:
        if self._joined is not None:
            self._joined.close_input()

    def catch_up(self) -> bool:
        return self._joined is not None and self._joined.catch_up()

    def give_up(self, why: str, on_frame: Callable[[Frame], None]) -> None:
        """End a worker that hangs: it may write down where for a second, then its actor is killed.

        If Ray does not report then that the actor is dead, its whole node may hang, and is a
        suspect.
        """
        self._ended_because = self._ended_because or why
        if self._joined is not None:
            self._joined.listen_to(on_frame)
            self._joined.close_input()
        self._set_timer(_LAST_WORDS_S, self._kill_hung)

    def kill(self, why: str = "") -> None:
        """Kill its actor, and have nothing more to do with it.

        Args:
            why: For the log.
        """
        self._ended_because = self._ended_because or why
        self._loop.call_soon(self._end, "it was killed by the service")

    def abandon(self) -> None:
        self._forget_ticket()
        if self._joined is not None:
            self._joined.abandon()
        self._session.kill(self._actor)
        if not self._loop.is_closed() and not self._ended.done():
            self._ended.set_result(None)

    async def ended(self) -> None:
        await asyncio.shield(self._ended)

    # -- from the actor that is asked for to the worker that is there

    def _ask(self) -> None:
        self._ticket, token = secrets.token_hex(8), secrets.token_bytes(_TOKEN_BYTES)
        self._avoids, self._asked_at = False, self._loop.time()
        self._times_asked += 1
        self._session.gate.invitations[self._ticket] = Invitation(token, _refusal, self._connected)
        order = ActorOrder(self._launch, self._place, self._ticket, token, self._times_asked % 2 == 0)
        self._session.place(order, lambda: not self._ended.done(), self._placed)
        self._look_again()

    def _placed(self, order: ActorOrder, made: Placed | BaseException) -> None:
        """Keep the actor that Ray has taken note of, whether it has room for it or not."""
        if order.ticket != self._ticket or self._ended.done():
            if isinstance(made, Placed):
                self._session.kill(made.actor)
            return
        if isinstance(made, BaseException):
            self._end(f"Ray cannot take it: {named_text_of(made)[:_LONGEST_TEXT]}")
            return
        self._actor, self._call, self._avoids = made.actor, made.call, made.avoids
        died = partial(self._session.from_ray, self._died, order.ticket)
        made.call.future().add_done_callback(died)

    def _look(self) -> None:
        """See to an actor that has not connected yet.

        The log says what is missing. And another one is asked for if there is room for it, or if it
        must not be placed on nodes that were suspects and are none any more.
        """
        if self._joined is not None or self._ended.done():
            return
        waited_s = self._loop.time() - self._asked_at
        if self._avoids and waited_s >= SUSPECT_S:
            self._ask_again()
            return
        if waited_s >= self._patience_s:
            self._session.find_room(self._launch.setup.stage, partial(self._found_room, self._ticket))
        if self._loop.time() - self._told_at >= _LOOK_EVERY_S:
            self._told_at = self._loop.time()
            self._session.tell_what_is_missing(self._launch, self._place)
        self._look_again()

    def _look_again(self) -> None:
        self._set_timer(min(_LOOK_EVERY_S, self._patience_s), self._look)

    @property
    def _patience_s(self) -> float:
        """For how long an actor may take to connect although there is room for it.

        It is unlimited until one of the stage has connected, since Ray may have an environment to
        make first.
        """
        fastest_s = self._session.fastest_s.get(self._launch.setup.stage)
        if fastest_s is None:
            return inf
        patience_s = max(_PATIENCE_S, _TIMES_THE_FASTEST * fastest_s) * 2.0 ** (self._times_asked - 1)
        return min(patience_s, _MOST_PATIENCE_S)

    def _found_room(self, ticket: str, has_room: bool) -> None:
        if has_room and ticket == self._ticket and self._joined is None and not self._ended.done():
            text = "worker %s is asked for once more: the cluster has room for it, and it has not come"
            about = {"model": self._session.service, "stage": self._launch.setup.stage, "worker": self._name}
            logger.warning(text, self._name, extra=about)
            self._ask_again()

    def _ask_again(self) -> None:
        self._session.kill(self._actor)
        self._forget_ticket()
        self._ask()

    def _connected(self, sock: socket.socket, hello: Hello) -> None:
        self._forget_ticket()
        self._node = hello.node
        self._session.connected(self._launch.setup.stage, hello.node, self._loop.time() - self._asked_at)
        trusts = self._launch.is_idempotent
        self._joined = JoinedWorker(sock, hello, self._on_frame, self._disconnected, trusts_resets=trusts)
        self.send, self.send_ahead = self._joined.send, self._joined.send_ahead
        if self._timer is not None:
            self._timer.cancel()
        about = {"model": self._session.service, "stage": self._launch.setup.stage, "worker": self._name}
        about |= hello.place_in_cluster
        logger.info("worker %s is placed: %s", self._name, hello.whereabouts, extra=about)
        wanted = own_metrics.are_wanted()
        setup = msgspec.structs.replace(self._launch.setup, place=self._place, cores=None, sends_metrics=wanted)
        packed, now = pickle.dumps(setup, 5), self._session.clock()
        self.send(Frame(FrameKind.SETUP, ids=[0], formats=b"\0", payloads=[packed], made_at=now))

    # -- its end

    def _disconnected(self, why: str) -> None:
        if self.fell_silent:
            self._session.suspect(self._node)
        self._end(why)

    def _died(self, ticket: str, future: Any) -> None:
        if ticket != self._ticket or self._ended.done():
            return
        error = None if future.cancelled() else future.exception()
        if self._joined is not None:
            while self._joined.catch_up():  # what it wrote before it died
                pass
        if not self._ended.done():
            self._end("it ended" if error is None else named_text_of(error)[:_LONGEST_TEXT])

    def _kill_hung(self) -> None:
        self._session.kill(self._actor)
        self._set_timer(_DEATH_S, self._is_not_dead_yet)

    def _is_not_dead_yet(self) -> None:
        self._session.suspect(self._node)
        self._end("it could not be killed")

    def _end(self, why: str) -> None:
        if self._ended.done():
            return
        self._ended.set_result(None)
        self._forget_ticket()
        if self._timer is not None:
            self._timer.cancel()
        if self._joined is not None:
            self._joined.abandon()
            self._session.disconnected(self._node)
        self._session.kill(self._actor)
        self._actor = self._call = None
        self._on_lost(self._ended_because or why)

    def _forget_ticket(self) -> None:
        self._session.gate.invitations.pop(self._ticket, None)

    def _set_timer(self, delay_s: float, act: Callable[[], None]) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(delay_s, act)


def _drop(frame: Frame) -> None:
    """Stand in for sending to a worker that has not connected, which is not ready for anything."""


def _refusal(hello: Hello) -> str:
    if hello.version == __version__:
        return ""
    return f"the coordinator has carpool {__version__}, and the node {hello.version}: install the same version on both"
