"""The life of a batched function: every situation in which it may be called or closed, for each kind of function.

Each program runs in an interpreter of its own, since it forks, ends loops or ends itself; what it prints is compared.
A cell that hangs is killed by its time-out. `f` is the function, `call` calls it from anywhere, `close` closes it.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from tests.effort import slow_where

PATIENCE_S = 60.0

PRELUDE = """
import asyncio, os, sys, threading, time
import carpool

entered, gate = threading.Semaphore(0), threading.Event()
origin = os.getpid()

def done(xs):
    return [2 * x for x in xs]

class K:
    pass
"""

KINDS = {
    "def": '''
@carpool.batch(max_batch_size=4)
def f(xs):
    if 0 in xs: entered.release(); gate.wait(30)
    return done(xs)
''',
    "method": '''
class K:
    @carpool.batch(max_batch_size=4)
    def m(self, xs):
        if 0 in xs: entered.release(); gate.wait(30)
        return done(xs)
k = K()
f = k.m
''',
    "model": '''
class M(carpool.Model):
    inside = gone = 0
    def predict(self, xs):
        assert not M.gone
        M.inside += 1
        if 0 in xs: entered.release(); gate.wait(30)
        M.inside -= 1
        return done(xs)
    def teardown(self):
        assert not M.inside or os.getpid() != origin
        M.gone += 1
f = carpool.batch(max_batch_size=4)(M)
''',
    "async def": '''
@carpool.batch(max_batch_size=4)
async def f(xs):
    if 0 in xs:
        entered.release()
        while not gate.is_set(): await asyncio.sleep(0.001)
    return done(xs)
''',
    "async method": '''
class K:
    @carpool.batch(max_batch_size=4)
    async def m(self, xs):
        if 0 in xs:
            entered.release()
            while not gate.is_set(): await asyncio.sleep(0.001)
        return done(xs)
k = K()
f = k.m
''',
    "async model": '''
class M(carpool.Model):
    inside = gone = 0
    async def setup(self): await asyncio.sleep(0)
    async def predict(self, xs):
        assert not M.gone
        M.inside += 1
        if 0 in xs:
            entered.release()
            while not gate.is_set(): await asyncio.sleep(0.001)
        M.inside -= 1
        return done(xs)
    async def teardown(self):
        assert not M.inside or os.getpid() != origin
        await asyncio.sleep(0.01)
        M.gone += 1
f = carpool.batch(max_batch_size=4)(M)
''',
}  # fmt: skip

SITUATIONS = {
    "closed by several at once, with calls inside": (
        """
calls = [start(call, x) for x in (0, 1, 2)]
entered.acquire()
ends = [start(close) for _ in range(4)]
time.sleep(0.1)
print([end.told for end in ends])
gate.set()
print(sorted(one.wait() for one in calls), [end.wait() for end in ends])
""",
        "[None, None, None, None]\n[0, 2, 4] ['closed', 'closed', 'closed', 'closed']",
    ),
    "closed twice, and called then": (
        """
print(start(call, 1).wait(), start(close).wait(), start(close).wait(), start(call, 2).wait())
""",
        "2 closed closed Unavailable",
    ),
    "closed before the first call": (
        """
print(start(close).wait(), start(call, 1).wait(), start(close).wait())
""",
        "closed Unavailable closed",
    ),
    "called while it is being closed": (
        """
first = start(call, 0)
entered.acquire()
end = start(close)
later = []
while "Unavailable" not in [one.told for one in later]:
    later.append(start(call, 1))
    time.sleep(0.01)
gate.set()
print(first.wait(), end.wait(), {one.wait() for one in later} <= {2, "Unavailable"})
""",
        "0 closed True",
    ),
    "closed against a crowd of callers": (
        """
def crowd(first):
    told = set()
    for x in range(first, first + 1000):
        y = call(x)
        told.add(y if isinstance(y, str) else y == 2 * x)
    return "".join(map(str, sorted(told, key=str)))
callers = [start(crowd, n) for n in range(1, 8001, 1000)]
time.sleep(0.02)
print(start(close).wait())
print({caller.wait() for caller in callers} <= {"True", "TrueUnavailable", "Unavailable"})
""",
        "closed\nTrue",
    ),
    "in a forked child while a call is inside": (
        """
first = start(call, 0)
entered.acquire()
behind = start(call, 3)
time.sleep(0.05)
if not (child := os.fork()):
    gate.set()
    print(call(1), call(0), close(), call(2), flush=True)
    os._exit(0)
os.waitpid(child, 0)
gate.set()
print(first.wait(), behind.wait(), call(2))
""",
        "2 0 closed Unavailable\n0 6 4",
    ),
    "in a forked child of one that is closed": (
        """
print(call(1), close(), flush=True)
if not (child := os.fork()):
    print(call(1), close(), flush=True)
    os._exit(0)
os.waitpid(child, 0)
""",
        "2 closed\nUnavailable closed",
    ),
    "never called, and the interpreter ends": ("print('end')", "end"),
}


def run(program: str) -> str:
    """What a program prints; nothing must go to stderr.

    Since Python 3.12 `os.fork` itself warns of the other threads, among which the programs fork on purpose, and carpool
    warns in the child of functions that have run.
    """
    ignored = ("This process:DeprecationWarning", "this process was forked after:RuntimeWarning")
    options = ["-W", "always", *[word for each in ignored for word in ("-W", f"ignore:{each}")]]
    done = subprocess.run(
        [sys.executable, *options, "-c", program], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.stderr == ""
    assert done.returncode == 0
    return done.stdout.strip()


THREADS = """
def call(x):
    try: return f(x)
    except carpool.Unavailable: return "Unavailable"

def close():
    f.close()
    return "closed"
"""

TASKS = '''
loop = asyncio.new_event_loop()

def on_loop(make):
    """In the parent on one loop in a thread of its own, in a forked child on one of its own."""
    if os.getpid() != parent: return asyncio.run(make())
    return asyncio.run_coroutine_threadsafe(make(), loop).result(30)

async def acall(x):
    try: return await f(x)
    except carpool.Unavailable: return "Unavailable"

async def aclose():
    await f.close()
    return "closed"

def call(x): return on_loop(lambda: acall(x))
def close(): return on_loop(aclose)

parent = os.getpid()
runs = threading.Thread(target=loop.run_forever)
runs.start()
'''

ENDS = """
loop.call_soon_threadsafe(loop.stop)
runs.join()
loop.close()
"""

START = """
class start(threading.Thread):
    def __init__(self, what, *args):
        super().__init__()
        self.what, self.args, self.told = what, args, None
        self.start()
    def run(self): self.told = self.what(*self.args)
    def wait(self):
        self.join(30)
        return self.told
"""


@pytest.mark.fault("F72")
@slow_where(lambda situation, kind: kind != ("def" if "forked" in situation else "async method"))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("situation", SITUATIONS)
def test_every_call_ends(situation: str, kind: str) -> None:
    """In every situation, whatever meets whatever, a call ends with an answer or a clear error."""
    program, expected = SITUATIONS[situation]
    asynchronous = kind.startswith("async")
    parts = [PRELUDE, KINDS[kind], START, TASKS if asynchronous else THREADS, program, ENDS if asynchronous else ""]

    assert run("\n".join(parts)) == expected


def alone(program: str) -> str:
    return run(PRELUDE + textwrap.dedent(program))


# -- threads


def test_closing_runs_tickets_that_nobody_waits_for() -> None:
    """Closing runs tickets that nobody waits for, also those that another closer's batch has left,
    in a line that somebody leads.
    """
    program = """
        @carpool.batch(max_batch_size=2)
        def f(xs):
            if 0 in xs: entered.release(); gate.wait(30)
            return done(xs)
        first = threading.Thread(target=f, args=(0,))
        first.start()
        entered.acquire()
        tickets = [f.submit(x) for x in range(1, 6)]
        ends = [threading.Thread(target=f.close) for _ in range(3)]
        for end in ends: end.start()
        time.sleep(0.05)
        print([end.is_alive() for end in ends])
        gate.set()
        for end in ends: end.join(30)
        print([ticket.done() for ticket in tickets], [ticket.result() for ticket in tickets])
    """
    assert alone(program) == f"{[True] * 3}\n{[True] * 5} {[2, 4, 6, 8, 10]}"


def test_closing_waits_for_a_batch_that_all_have_left() -> None:
    """If all callers of a batch have left while the function still runs, closing waits for it, and
    the model is not torn down below it.
    """
    program = """
        class M(carpool.Model):
            inside = False
            def predict(self, xs):
                M.inside = True
                entered.release(); gate.wait(30)
                M.inside = False
                return done(xs)
            def teardown(self): print(f"teardown {M.inside}")  # in one piece
        f = carpool.batch(max_batch_size=1, timeout_s=1.0)(M)
        def lead():  # the batch of a ticket that nobody waits for
            try: print(f(2))
            except TimeoutError as error: print(type(error).__name__)
        f.submit(1)
        leader = threading.Thread(target=lead)
        leader.start()
        entered.acquire()
        time.sleep(1.1)
        end = threading.Thread(target=f.close)
        end.start()
        time.sleep(0.1)
        print(end.is_alive())
        gate.set()
        end.join(30)
        leader.join(30)
    """
    told = alone(program)  # two threads print
    assert told.startswith("True\n")
    assert "teardown False" in told
    assert "DeadlineExceeded" in told


@pytest.mark.parametrize("how", ["", "async "])
def test_closing_from_inside_is_an_error_at_once(how: str) -> None:
    """Closing a function from inside would wait for its own caller, and is an error at once; the
    line goes on.
    """
    program = f"""
        class M(carpool.Model):
            {how}def predict(self, xs):
                if xs == [9]: {"await " if how else ""}f.close()
                return done(xs)
            {how}def teardown(self): print("teardown")
        f = carpool.batch(M)
        {how}def main():
            try: {"await " if how else ""}f(9)
            except RuntimeError as error: print(error)
            print({"await " if how else ""}f(1))
            {"await " if how else ""}f.close()
        {"asyncio.run(main())" if how else "main()"}
    """
    told = alone(program).splitlines()
    assert "from inside itself" in told[0]
    assert told[1:] == ["2", "teardown"]


def test_a_ticket_of_the_parent_is_refused_in_a_child() -> None:
    """A ticket of the parent is refused in a forked child, and keeps its place in the parent's
    line.
    """
    program = """
        @carpool.batch
        def f(xs): return done(xs)
        ticket, old = f.submit(1), f.submit(2)
        print(f(0), old.result(), flush=True)
        ticket = f.submit(1)
        if not (child := os.fork()):
            for ask in (ticket.result, ticket.result, ticket.cancel):
                try: print(ask())
                except RuntimeError as error: print(error)
            print(old.result(), f(3), ticket.done(), flush=True)
            os._exit(0)
        os.waitpid(child, 0)
        print(ticket.result())
    """
    told = alone(program).splitlines()
    assert told[0] == "0 4"
    assert all("forked after this call of f had joined the line" in line for line in told[1:4])
    assert told[4:] == ["4 6 False", "2"]


@slow_where(lambda form, filter: filter == "error" and form not in ("def", "async def"))
@pytest.mark.parametrize("form", ["def", "method", "async def", "thread"])
@pytest.mark.parametrize("filter", ["always", "error"])
def test_a_function_that_ran_before_the_fork_warns_once_in_the_child(form: str, filter: str) -> None:
    """Threads of libraries do not survive a fork, so that a function that has run may hang in the child: it warns once
    there, before it runs, and names --preload. In the parent, and if it runs in the child only, it does not.
    """
    program = """
        import warnings
        told = []
        class M:
            @carpool.batch
            def f(self, xs): return done(xs)
        make = {
            "def": lambda: carpool.batch(done),
            "method": lambda: M().f,
            "async def": lambda: carpool.batch(arun),
            "thread": lambda: carpool.batch(done, run_in="thread"),
        }[FORM]
        async def arun(xs): return done(xs)
        def call(f, x):
            async def main(): return await f(x)
            try: return f(x) if FORM in ("def", "method") else asyncio.run(main())
            except RuntimeWarning as warning: return str(warning)
        f, never_called = make(), make()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter(FILTER)
            print(call(f, 1), call(f, 2), flush=True)
            if not (child := os.fork()):
                print(call(f, 3), call(f, 4), call(never_called, 5))
                print(*[str(each.message) for each in told if each.category is RuntimeWarning], sep="\\n", flush=True)
                os._exit(0)
            os.waitpid(child, 0)
            print(call(f, 5), [str(each.message) for each in told if each.category is RuntimeWarning])
    """
    told = alone(program.replace("FORM", repr(form)).replace("FILTER", repr(filter)))
    assert told.splitlines()[0] == "2 4"
    assert told.splitlines()[-1] == "10 []"
    assert told.count("gunicorn without --preload") == 1
    assert told.splitlines()[1].endswith("8 10")


@pytest.mark.fault("F72")
@pytest.mark.parametrize("ends", ["return done(xs)", "sys.exit(7)", "raise KeyboardInterrupt"])
def test_a_fork_inside_the_function(ends: str) -> None:
    """When the function forks, the child's copy of the leader has its own answer or an error, and
    in both processes the function can be called.
    """
    program = f"""
        pids = []
        @carpool.batch(max_batch_size=2, isolate_errors=False)
        def f(xs):
            if 0 not in xs: return done(xs)
            pids.append(os.fork())
            if not pids[0]:
                print(f(5), flush=True)
                {ends}
            os.waitpid(pids[0], 0)
            return done(xs)
        ticket = f.submit(1)
        try: print(f(0), flush=True)
        except (SystemExit, KeyboardInterrupt) as error: print(repr(error), flush=True)
        if not pids[0]: print(f(3), flush=True); os._exit(0)
        print(f(4), ticket.result(), flush=True)
    """
    first = {"return done(xs)": "0", "sys.exit(7)": "SystemExit(7)", "raise KeyboardInterrupt": "KeyboardInterrupt()"}
    told = alone(program).splitlines()
    assert told[:2] == ["10", first[ends]]
    assert told[2:] == ["6", "0", "8 2"]


def test_a_forked_child_does_not_wait_for_a_lock_of_a_thread_that_is_not_there() -> None:
    """A forked child does not wait for a lock that a thread of its parent held, neither the line's
    nor a shared `carpool.Lock`.
    """
    program = """
        lock = carpool.Lock()
        @carpool.batch(execution_lock=lock)
        def f(xs):
            if 0 in xs: entered.release(); gate.wait(30)
            return done(xs)
        first = threading.Thread(target=f, args=(0,))
        first.start()
        entered.acquire()
        with f._driver._lock:
            if not (child := os.fork()):
                print(f(1), flush=True)
                os._exit(0)
        os.waitpid(child, 0)
        gate.set()
        first.join()
    """
    assert alone(program) == "2"


def test_a_ticket_is_left_when_the_interpreter_ends() -> None:
    """A ticket that nobody waits for is not run when the interpreter ends, and nothing is said of
    it.
    """
    program = """
        @carpool.batch
        def f(xs): print("ran"); return xs
        ticket = f.submit(1)
    """
    assert alone(program) == ""


# -- tasks


@pytest.mark.fault("F72")
@pytest.mark.parametrize("size", [1, 2, 100])
def test_a_loop_that_ends_unclosed(size: int) -> None:
    """The callers of a loop that ends without a close are cancelled with it, nothing is said, and
    the function serves the next loop.
    """
    program = f"""
        @carpool.batch(max_batch_size={size})
        async def f(xs):
            if 0 in xs: await asyncio.sleep(30)
            return done(xs)
        async def main():
            calls = [asyncio.ensure_future(f(x)) for x in range(6)]
            await asyncio.sleep(0.01)
            return calls
        for _ in range(2):
            print([call.cancelled() for call in asyncio.run(main())])
        print(asyncio.run(f(1)))
    """
    assert alone(program) == f"{[True] * 6}\n{[True] * 6}\n2"


@pytest.mark.fault("F72")
def test_one_who_closes_is_cancelled() -> None:
    """If one of several who close is cancelled, the others who close and the callers inside do not
    notice.
    """
    program = """
        @carpool.batch
        async def f(xs):
            while not gate.is_set(): await asyncio.sleep(0.001)
            return done(xs)
        async def main():
            call = asyncio.ensure_future(f(1))
            await asyncio.sleep(0.01)
            ends = [asyncio.ensure_future(f.close()) for _ in range(3)]
            await asyncio.sleep(0.01)
            ends[0].cancel()
            gate.set()
            await asyncio.wait([call, *ends])
            print(call.result(), [end.cancelled() for end in ends])
        asyncio.run(main())
    """
    assert alone(program) == "2 [True, False, False]"


def test_a_model_is_set_up_once_for_loops_in_several_threads() -> None:
    """A model is set up once for loops in several threads: another loop's caller waits meanwhile,
    and sets the model up itself if the first loop goes away.
    """
    program = """
        class M(carpool.Model):
            n = 0
            async def setup(self):
                M.n += 1
                await asyncio.sleep(30 if M.n == 1 else 0.2)
            async def predict(self, xs): return done(xs)
        f = carpool.batch(M)
        async def gives_up():
            call = asyncio.ensure_future(f(1))
            while not M.n: await asyncio.sleep(0.001)
            call.cancel()
            await asyncio.wait([call])
            print(call.cancelled())
        asyncio.run(gives_up())
        told = []
        threads = [threading.Thread(target=lambda: told.append(asyncio.run(f(1)))) for _ in range(4)]
        for thread in threads: thread.start()
        for thread in threads: thread.join(30)
        print(told, M.n)
    """
    assert alone(program) == "True\n[2, 2, 2, 2] 2"


def test_calls_of_another_loop_after_the_model_is_torn_down() -> None:
    """After the model was torn down, calls of another loop are told that the function is closed,
    and do not set it up again.
    """
    program = """
        class M(carpool.Model):
            ups = 0
            async def setup(self): M.ups += 1
            async def predict(self, xs):
                if 0 in xs:
                    entered.release()
                    while not gate.is_set(): await asyncio.sleep(0.001)
                return done(xs)
        f = carpool.batch(max_batch_size=1)(M)
        async def main():
            calls = [asyncio.ensure_future(f(x)) for x in (0, 1)]
            for told in await asyncio.gather(*calls, return_exceptions=True): print(repr(told))
        other = threading.Thread(target=lambda: asyncio.run(main()))
        other.start()
        entered.acquire()
        asyncio.run(f.close())
        gate.set()
        other.join(30)
        print(M.ups)
    """
    assert alone(program) == "0\nUnavailable('M is closed')\n1"
