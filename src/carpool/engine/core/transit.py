"""What becomes of results: answers of requests, or what waits at the next nodes of the graph.

Each request is answered once: whoever calls `answer`, `fail` or `expire` owns the answer, and the
request, which is not done yet, becomes so. A request of which a fork has made others (its children)
runs until they are joined, and stands in `families`. The children never outlive it: the first
error, an early answer, a cancellation and a deadline all take every child out, wherever it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from carpool.engine.core.batch import DONE_EARLY, Reply
from carpool.engine.core.content import Content
from carpool.engine.core.graph import JOIN, After, Door, Each, Fork, Node, Onward, Switch, needs_of
from carpool.engine.core.journal import Journal, extend_trails, format_expiry, parts_so_far
from carpool.engine.core.lobby import acquit
from carpool.engine.fast_paths import fast_path
from carpool.engine.policy.base import FULL
from carpool.engine.request import DONE, QUEUED, RUNNING, Request
from carpool.errors import CarpoolError, DeadlineExceeded, ModelError, Overloaded, Unavailable

_CHILDREN = 2**40
"""Ids of children are above this: a service counts its requests from 1 as they come."""

Moves = dict[Node, list[Request]]
"""Requests that are on their way, by the nodes to which they come."""


class Siblings:
    """The children of a request, which a fork or `Each` has made, in order, and what those have
    come to that are done. It is the `caller` of each of them.
    """

    __slots__ = ("block", "children", "parent", "results")

    def __init__(self, parent: Request, block: Fork | Each) -> None:
        self.parent = parent
        self.block = block
        self.children: Sequence[Request] = ()
        self.results: dict[Request, object] = {}

    def answered(self, request: Request) -> None:
        """Take no note: what a child comes to never is an answer."""

    def let_go(self) -> None:
        """Refer to the children no more, who refer to this: no circle is left to be collected."""
        self.children, self.results = (), {}


def asked(request: Request) -> Request:
    """Return the request of a caller of which a request is a child; itself if it is none."""
    while type(family := request.caller) is Siblings:
        request = family.parent
    return request


class Transit:
    """Ends requests, or has them go on.

    Attributes:
        answers: The requests whose answers no poll has returned yet.
        families: By parent, the requests of which children are under way.
        last_id: The id that was given last.
    """

    def __init__(self, journal: Journal | None) -> None:
        self.answers: list[Request] = []
        self.families: dict[Request, Siblings] = {}
        self.last_id = 0
        self._last_child = _CHILDREN
        self.journal = journal

    # -- ends

    def answer(self, now: float, request: Request) -> None:
        request.state = DONE
        request.node.flow.answered += 1
        self.answers.append(request)
        if self.journal is not None:
            outcome = "answered" if request.error is None else f"failed: {request.error}"
            self.journal.record(now, outcome, request.id, detail=parts_so_far(now, request))

    def fail(self, now: float, request: Request, error: Exception) -> None:
        """End a request with an error; of a child, the parent and all that has become of it.

        Where a fork keeps errors, what a model or a lost worker has cost a branch is its result.
        """
        while type(family := request.caller) is Siblings:
            if family.block.keeps_errors and _may_be_kept(now, request, error):
                self._keep(now, request, family, error)
                return
            request.state = DONE
            request = family.parent
            if self.families.get(request) is not family:  # another child was faster
                return
            self._close(now, family)
        request.error = error
        request.node.flow.failed += 1
        self.answer(now, request)

    def _keep(self, now: float, child: Request, family: Siblings, error: Exception) -> None:
        if self.families.get(family.parent) is not family:  # another child was faster
            child.state = DONE
            return
        flow = child.node.flow
        child.error = None
        child.node = flow.on_the_way
        value = flow.content.as_value(error, child.accept if family.block.ends else 0)
        if self.journal is not None:
            self.journal.record(now, f"failed, which is a value: {error}", child.id)
        moves: Moves = {}
        self._go_on(now, child, JOIN, value, None, moves, is_encoded=True)
        self.move(now, moves)

    def expire(self, now: float, request: Request, started: float | None = None, hint: str = "") -> None:
        """End a request whose deadline has passed; a worker has had it since `started`, None if
        none has.
        """
        error = DeadlineExceeded(format_expiry(now, request, started) + hint)
        error.worker_lost = request.losses > 0
        self.fail(now, request, error)

    def refuse(self, request: Request, error: CarpoolError) -> None:
        request.state = DONE
        request.error = error
        self.answers.append(request)

    def withdraw(self, now: float, request: Request) -> None:
        """Take a request out, wherever it is, with all that has become of it; it is now done."""
        family = self.families.get(request) if self.families else None
        node = request.node
        if family is not None:
            self._close(now, family)
            request.state = DONE
        elif type(node) is Node:
            if request.state == QUEUED:
                node.crew.lobby.leave(now, request)
            else:
                request.state = DONE
                node.crew.caller_changed(now, request)
        elif type(node) is Door and request.state == QUEUED:
            node.queue.remove(request)
        else:
            request.state = DONE  # it is on its way

    def _close(self, now: float, family: Siblings) -> None:
        del self.families[family.parent]
        family.block.running -= 1
        for child in family.children:
            if child.state in (QUEUED, RUNNING):
                self.withdraw(now, child)
        family.let_go()

    # -- results of workers

    @fast_path("answer_at_once")
    def answer_all(self, flow: Any, takers: Sequence[Request | None], results: Sequence[object]) -> int | None:
        """Answer the requests of a reply that has no errors, at a node that is the last; return how
        many results came too late.

        Fast path of `sort_out`: the same outcome, see tests/engine/core/test_fast_paths.py.
        """
        answers = self.answers
        before = len(answers)
        for request, result in zip(takers, results, strict=True):
            if request is not None and request.state == RUNNING:
                request.state = DONE
                request.result = result
                answers.append(request)  # one by one: a thread that is killed amid a batch must lose none
        answered = len(answers) - before
        flow.answered += answered
        return len(takers) - takers.count(None) - answered

    def sort_out(
        self, now: float, crew: Any, reply: Reply, takers: Sequence[Request | None], began: float | None
    ) -> None:
        """End the requests of a reply that end with it, and have the others go on.

        Each request that is answered ends in one of six ways:

        1. its caller does not wait any more, or it never was that worker's: the result is dropped;
        2. its deadline had passed when the worker read it: it expires;
        3. it has failed: it is answered with its error;
        4. nothing follows, or its result says so (`DONE_EARLY`): it is answered with its result;
        5. its deadline has passed since, and another stage would follow: it expires;
        6. else the result goes on to what follows, unless it cannot be weighed for it, which fails
           the request.

        Args:
            takers: The requests, each in the place of its result; None for a stray one.
            began: When the worker began with the batch; None if it is not the one that it runs.
        """
        results, errors, turns = reply.results, reply.errors, reply.turns
        node: Node = crew.lobby.nodes[0]
        following = node.after
        # mostly all results go the same way, which is then found out once
        is_plain = turns is None and not node.is_shared and (following is None or type(following) is Node)
        moves: Moves = {}
        passed: list[Request] = []
        for i, request in enumerate(takers):
            if request is None:
                continue
            if request.state != RUNNING:
                crew.late_results += 1
            elif errors is not None and i in errors:
                if isinstance(errors[i], DeadlineExceeded):  # the worker has not seen where the time went
                    self.expire(now, request, began)
                else:
                    self.fail(now, request, errors[i])
            elif not is_plain:
                self.take_turn(now, request, results[i], None if turns is None else turns.get(i), began, moves)
            elif following is None:
                request.result = results[i]
                self.answer(now, request)
            elif request.deadline <= now:
                self.expire(now, request, began)
            elif self._weigh(now, request, following, results[i]):  # type: ignore[arg-type] # a `Node`, see above
                request.item = results[i]
                request.nbytes = node.flow.measure(results[i])
                passed.append(request)
        if passed:
            assert began is not None
            self._pass_on(now, node, following, passed, began)  # type: ignore[arg-type]
        if moves:
            self.move(now, moves)

    def take_turn(
        self, now: float, request: Request, result: object, turn: object, began: float | None, moves: Moves
    ) -> None:
        """Have a result go where its node, or the result itself, says (see `Reply.turns`); those
        that go on are put into `moves`, and `move` has them come to their nodes.
        """
        node: Node = request.node
        if turn is DONE_EARLY:
            node.crew.lobby.early += 1
            self._answer_early(now, request, result)
        elif node.is_last and turn is None:
            request.result = result
            self.answer(now, request)
        elif request.deadline <= now:
            self.expire(now, request, began)
        else:
            assert began is not None
            if request.losses:
                acquit(request)
            if node.is_shared:
                request.lane = request.lane._replace(source=None)
            if self.journal is not None:
                self.journal.record(now, "passed", request.id, node.name)
            extend_trails([request], node, began, now)
            request.node = node.flow.on_the_way
            self._go_on(now, request, node.after, result, turn, moves, is_encoded=True)

    def _answer_early(self, now: float, request: Request, result: object) -> None:
        while type(family := request.caller) is Siblings:
            request.state = DONE
            request = family.parent
            self._close(now, family)
        request.stream = None  # it has no parts
        request.result = result
        self.answer(now, request)

    def _pass_on(self, now: float, node: Node, following: Node, requests: Sequence[Request], began: float) -> None:
        extend_trails(requests, node, began, now)
        for request in requests:
            request.node = following
            request.arrived = now
            request.format = 0
            if self.journal is not None:
                self.journal.record(now, "passed", request.id, node.name)
        if node.block is not None:  # a later one of the reply may have failed, and so its siblings
            requests = [request for request in requests if request.state == RUNNING]
        if requests:
            self._enter(now, following, requests)

    # -- requests go on

    def begin(self, now: float, requests: Sequence[Request], door: Door) -> None:
        start = door.start
        if type(start) is Node:
            for request in requests:
                request.node = start
            if not start.begins:
                for request in requests:
                    request.trail = None  # type: ignore[assignment]
            self._enter(now, start, requests)
            return
        moves: Moves = {}
        for request in requests:
            request.state = RUNNING
            request.node = door
            if door.begins:
                request.trail = None  # type: ignore[assignment]
            self._go_on(now, request, start, request.item, None, moves, is_new=False)
        self.move(now, moves)

    def let_in(self, now: float, child: Request, each: Each) -> None:
        """Have an item of a list, which comes from the list's door, begin its way."""
        moves: Moves = {}
        child.node = each.door.flow.on_the_way
        self._go_on(now, child, each.body, child.item, None, moves, is_new=child.format == 0)
        self.move(now, moves)

    def move(self, now: float, moves: Moves) -> None:
        for node, requests in moves.items():
            there = [request for request in requests if request.state == RUNNING]  # a sibling may have failed
            for request in there:
                request.node = node
                request.arrived = now
            if there:
                self._enter(now, node, there)

    def _enter(self, now: float, node: Node, requests: Sequence[Request]) -> None:
        if node.is_shared:
            node.came += len(requests)
            for request in requests:
                request.lane = request.lane._replace(source=node)
        node.crew.enter(now, requests)

    def _go_on(
        self,
        now: float,
        request: Request,
        after: After,
        item: Any,
        turn: object,
        moves: Moves,
        *,
        is_new: bool = True,
        is_encoded: bool = False,
    ) -> None:
        """Have a request, which runs, go on with an item to what follows.

        Args:
            turn: The name of the way that it takes, or the `Onward`; None if it names none.
            is_new: Whether it is the result of a node, and not what the request came with.
            is_encoded: Whether it is in the format that the caller accepts, if it is the answer or
                a part of it.
        """
        content = request.node.flow.content
        results: Sequence[object] | None = None  # of the block `after`, if its children are done, or it has none
        while True:
            format = 0 if is_new else request.format
            items: list[Any] = []
            try:
                if results is not None:
                    item = content.joined(after, results, request.accept if after.ends else 0)  # type: ignore[union-attr]
                    is_new, is_encoded, after, results = True, after.ends, after.then, None  # type: ignore[union-attr]
                if isinstance(after, Switch):
                    found = turn if type(turn) is Onward else way_of(after, item, format, content, turn)
                    if found.refuses and not _has_room(found.after, moves):
                        again_s = request.node.flow.retry_after_s(now)
                        raise Overloaded(FULL, retry_after_s=again_s, reason="queue_full")
                    after, turn = found.after, None
                elif turn is not None:
                    text = f"a result names {turn!r} as its branch, and no Route follows"
                    raise ModelError(text, code="bad_result")
                if isinstance(after, Fork):
                    items = [item] * len(after.branches)
                elif isinstance(after, Each):
                    items = content.items(item, 0 if is_new else request.format, after.most)
                elif not isinstance(after, Node):
                    ends = after is None or request.caller.block.ends  # type: ignore[union-attr] # of a child it is a family
                    if not (is_encoded if ends else is_new):
                        item = content.handed_on(item, 0 if is_new else request.format, request.accept if ends else 0)
            except CarpoolError as error:
                self.fail(now, request, error.with_traceback(None))  # else it and the request would hold each other
                return
            if isinstance(after, Node):
                if self._come_to(now, request, after, item, is_new):
                    moves.setdefault(after, []).append(request)
                return
            if isinstance(after, Fork | Each):
                if items:
                    self._split(now, request, after, items, moves, is_new)
                    return
                results = ()
                continue
            if after is None:
                request.result = item
                self.answer(now, request)
                return
            family = request.caller
            assert after is JOIN and type(family) is Siblings
            request.state = DONE
            family.results[request] = item
            if len(family.results) < len(family.children):
                return
            family.parent.trail = request.trail  # of the child that was waited for longest
            request, after = family.parent, family.block
            del self.families[request]
            after.running -= 1
            results = [family.results[child] for child in family.children]
            family.let_go()
            if self.journal is not None:
                self.journal.record(now, "is joined", request.id)

    def _split(
        self, now: float, request: Request, block: Fork | Each, items: list[Any], moves: Moves, is_new: bool
    ) -> None:
        family = self.families[request] = Siblings(request, block)
        block.running += 1
        place = block.door if isinstance(block, Each) else request.node.flow.on_the_way
        children = []
        for item in items:
            child = Request(item, request.deadline, family, request.nbytes)
            self._last_child = child.id = self._last_child + 1
            child.state = RUNNING
            child.node = place
            child.due, child.bulk, child.patient = request.due, request.bulk, True
            child.lane, child.size, child.length = request.lane, request.size, request.length
            child.format = 0 if is_new else request.format
            child.accept = request.accept
            child.admitted, child.arrived, child.trail = request.admitted, now, request.trail
            children.append(child)
        family.children = children
        if self.journal is not None:
            self.journal.split(now, request.id, [child.id for child in children], block.names)
        if isinstance(block, Each):
            block.door.queue.push(children)
            return
        for child, branch in zip(children, block.branches, strict=True):
            if child.state == RUNNING:  # else a sibling has failed already
                self._go_on(now, child, branch, child.item, None, moves, is_new=is_new)

    def _come_to(self, now: float, request: Request, node: Node, item: object, is_new: bool) -> bool:
        if is_new:
            if not self._weigh(now, request, node, item):
                return False
            request.nbytes = node.flow.measure(item)
            request.format = 0
        else:
            try:
                node.crew.lobby.weigh(request, item, request.format)
            except BaseException as error:
                return self._unweighed(now, request, node, error)
        request.item = item
        return True

    def _weigh(self, now: float, request: Request, node: Node, result: object) -> bool:
        try:
            if request.losses:
                acquit(request)  # this restores its own key, before it gets that of the next stage
            node.crew.lobby.weigh(request, result)
        except BaseException as error:
            return self._unweighed(now, request, node, error)
        return True

    def _unweighed(self, now: float, request: Request, node: Node, error: BaseException) -> bool:
        if not isinstance(error, CarpoolError):  # a `Weigher` raises no others; but another may be given
            kind = type(error).__name__
            error = ModelError(f"size= of stage {node.name} raised {kind}", type_name=kind)
        self.fail(now, request, error)
        return False


def way_of(switch: Switch, item: object, format: int, content: Content, turn: object = None) -> Onward:
    """Return what follows a switch for an item, whose maker may have named the way as its `turn`.

    Raises:
        CarpoolError: There is no such way, or `choose` raises.
    """
    after: After = switch
    refuses = False
    while isinstance(after, Switch):
        refuses = refuses or after.refuses
        known = ", ".join(map(repr, after.ways))
        name = turn
        if name is None:
            if after.choose is None:
                text = f"no branch was named, and Route has no choose=; there are {known}"
                raise ModelError(text, code="bad_result")
            name = content.choose(after.choose, item, format, known)
        ways: Mapping[Any, After] = after.ways
        try:
            after, turn = ways[name], None
        except (KeyError, TypeError):
            raise ModelError(f"there is no branch {name!r:.80}; there are {known}", code="bad_result") from None
    return Onward(after, refuses)


def _has_room(after: After, moves: Moves) -> bool:
    """Report whether there is room where one more request would wait that comes to `after`, beside
    those that are about to come to their nodes.
    """
    needs, lists = needs_of(after)
    return all(node.vacancy() > len(moves.get(node, ())) for node in needs) and not any(
        each.door.queue.count for each in lists
    )


def _may_be_kept(now: float, request: Request, error: Exception) -> bool:
    """Report whether an error may be the value of a branch: a model's, or a lost worker's.

    That of workers which were given up, and not run any further, is a `DeadlineExceeded`; of a
    deadline of the request's own it ends the request.
    """
    if isinstance(error, DeadlineExceeded):
        return request.losses > 0 and now < request.deadline
    return isinstance(error, ModelError) or (isinstance(error, Unavailable) and error.code == "worker_lost")
