"""No byte from the network reaches a decoder that can run code: by reading the sources, and by trying.

`pickle` is used between our own processes only, in the few places that are listed here; a new one needs a
reason why it is safe.
"""

from __future__ import annotations

import ast
import os
import pickle
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import cloudpickle
import msgspec
import pytest

import carpool
from carpool.http.app import App
from tests.support import models
from tests.support.http.front import get
from tests.support.http.net import Client, predict, serving
from tests.support.serving import Served, serve
from tests.support.sources import MODULES, imports, nodes_of

PICKLES = {
    "carpool.engine.wire.payload": "objects between our own processes, without what lies beside them",
    "carpool.engine.drive.process": "writes the Setup of a worker",
    "carpool.engine.worker.main": "reads its own Setup, the first frame from its parent",
    "carpool.engine.worker.program": "the model's reference, or a model that was typed in, within the Setup",
    "carpool.ray.actor_worker": "writes the Setup of a worker on a cluster",
    "carpool.ray.shell": "reads its own Setup, the first frame from its coordinator",
    "carpool.simulate.compare": "only asks whether a run can go to another process",
}
LOADS = {
    "carpool.engine.wire.payload": {"load"},
    "carpool.engine.worker.main": {"_live"},
    "carpool.engine.worker.program": {"unpack_model", "unpack_type"},
    "carpool.ray.shell": {"_read_setup"},
}
"""The functions that unpickle."""
READ_PAYLOADS = {
    "carpool.engine.worker.answer",
    "carpool.engine.worker.serve",
    "carpool.engine.worker.own",
    "carpool.service.content",
    "carpool.service.weigh",
    "carpool.engine.drive.callers",
    "carpool.engine.wire.outcome",
}
"""Who reads what `payload.dump` made: workers, of items, of parts from which an answer goes on, and of copies that
they make themselves, `size=`, a `choose=` in the coordinator and lists that it takes apart, and Python callers, of
results and, when they ask for it, of an error's `__cause__`. Nobody under `http`."""

DANGEROUS_MODULES = frozenset(
    {"marshal", "shelve", "dill", "cloudpickle", "joblib", "yaml", "jsonpickle", "msgpack_numpy", "torch", "codeop"}
)
DANGEROUS_NAMES = frozenset({"eval", "exec", "compile", "__import__"})
DANGEROUS_CALLS = frozenset({"load_module", "loadtxt", "fromfile", "find_class", "Unpickler"})


def functions_that_use(tree: ast.AST, name: str) -> set[str]:
    """Names of functions in which `pickle.<name>` is used."""
    found = set()
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            for node in ast.walk(function):
                match node:
                    case ast.Attribute(value=ast.Name("pickle"), attr=attr) if attr == name:
                        found.add(function.name)
    return found


def test_pickle_is_used_only_where_it_is_listed() -> None:
    """`pickle` is used only in the modules that are listed, and only by its name, so that reading
    finds it.
    """
    assert {name for name, tree in MODULES.items() if "pickle" in imports(tree)} == set(PICKLES)
    for tree in MODULES.mentioning("pickle").values():
        for node in nodes_of(tree):
            if isinstance(node, ast.ImportFrom):
                assert node.module != "pickle"
            if isinstance(node, ast.Import):
                assert all(alias.asname is None for alias in node.names if alias.name == "pickle")


def test_unpickling_happens_in_five_functions() -> None:
    """Only four functions unpickle, and what they read has been written by our own processes."""
    loads = {name: functions_that_use(tree, "loads") for name, tree in MODULES.mentioning("pickle").items()}
    assert {name: found for name, found in loads.items() if found} == LOADS


def test_the_front_never_reads_payloads() -> None:
    """The front forwards bodies as they are, and the worker's decoders for the network are JSON,
    msgpack and raw.
    """
    users = set()
    for name, tree in MODULES.mentioning("payload").items():
        for node in nodes_of(tree):
            match node:
                case ast.Attribute(value=ast.Name("payload"), attr="load"):
                    users.add(name)
                case ast.ImportFrom(module="carpool.engine.wire.payload", names=names) if any(
                    a.name == "load" for a in names
                ):
                    users.add(name)
    assert users == READ_PAYLOADS


def test_the_front_never_asks_for_a_cause() -> None:
    """The cause of a `ModelError` stays a pickle until a Python caller asks for it, in one place
    for those with a thread; the front never does.
    """
    askers, openers = set(), set()
    for name, tree in MODULES.mentioning("_cause").items():
        for node in nodes_of(tree):
            match node:
                case ast.Attribute(attr="__cause__", ctx=ast.Load()):
                    askers.add(name)
                case ast.Attribute(attr="_open_cause"):
                    openers.add(name)
    assert not {name for name in askers if ".http" in name}
    assert openers == {"carpool.engine.drive.callers"}
    assert askers == {
        "carpool.errors",
        "carpool.engine.hints.misfits",  # of msgspec's errors
        "carpool.engine.call.retry",  # of what models raise, in the worker
        "carpool.engine.worker.own",  # of a model's own ModelError
        "carpool.engine.wire.outcome",  # of a worker in this process, whose error is a value for a Python caller
        "carpool.testing.batches",  # of a model under test, in the test's own process
        "carpool.testing.steps",  # likewise
    }


def test_cloudpickle_only_writes() -> None:
    """cloudpickle is used in one function, to write what goes from the program to its own workers.
    What it writes holds code, and is read where the model's reference is read: in a worker, from
    the first frame of its parent.
    """
    tree = MODULES["carpool.engine.worker.program"]
    uses = [
        node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "cloudpickle"
    ]
    assert [use.attr for use in uses] == ["Pickler"]
    importers = [
        function.name
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef)
        and any(isinstance(node, ast.Constant) and node.value == "ray.cloudpickle" for node in ast.walk(function))
    ]
    assert importers == ["_cloudpickle"]
    readers = {name for name, tree in MODULES.mentioning("unpack_model").items() if "unpack_model" in ast.unparse(tree)}
    assert readers == {"carpool.engine.worker.program", "carpool.engine.worker.main", "carpool.ray.shell"}


ALLOWED = {
    "carpool.engine.worker.program": {"cloudpickle"},
    "carpool.hf": {"torch"},  # makes tensors and loads nothing
}


@pytest.mark.parametrize("module", MODULES)
def test_nothing_else_that_runs_code_from_bytes_is_there(module: str) -> None:
    """There is no other serializer that can run code and no `eval`; `runpy` runs the user's own
    main file in a worker.
    """
    tree = MODULES[module]
    dangerous = {name for name in imports(tree) if name.split(".")[0] in DANGEROUS_MODULES}
    assert dangerous == ALLOWED.get(module, set())
    assert "runpy" not in imports(tree) or module == "carpool.engine.worker.program"
    for node in nodes_of(tree):
        match node:
            case ast.Call(func=ast.Name(id=name)):
                assert name not in DANGEROUS_NAMES
            case ast.Attribute(attr=name):
                assert name not in DANGEROUS_CALLS


# -- by trying

CONTENT_TYPES = [
    *("application/json", "application/msgpack", "application/x-msgpack", "application/octet-stream", "text/plain"),
    *("application/x-pickle", "application/pickle", "application/x-cloudpickle", "application/octet-stream+pickle"),
    *("application/vnd.bentoml+pickle", "application/x-python-serialize", "application/x-python", "image/png"),
    *("application/json+pickle", "application/vnd.x+json", "application/x-numpy", "application/npy", "*/*", ""),
    *("multipart/form-data; boundary=x", "application/vnd.apache.arrow.stream"),
]


class Canary:
    """An object that makes a folder when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (self.path,)


PROGRAM = """
    import sys
    import carpool

    def watch(event, args):
        if event == "pickle.find_class" and args[0].split(".")[0] in ("os", "posix", "nt", "cloudpickle"):
            print("CODE FROM BYTES", args, file=sys.stderr, flush=True)

    sys.addaudithook(watch)  # in the parent, and in workers, which run this file, too

    def echo(x):
        return x

    def double(x: float) -> float:
        return 2 * x

    def size(x: bytes) -> int:
        return len(x)

    echo_service, double_service, size_service = (carpool.Service(model) for model in (echo, double, size))
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server whose processes report every class that unpickling looks up, if it is one that could do harm."""
    folder = tmp_path_factory.mktemp("canary")
    (folder / "program.py").write_text(textwrap.dedent(PROGRAM))
    with serve("program:echo_service", "program:double_service", "program:size_service", folder=folder) as served:
        yield served


def test_a_pickle_is_never_read_whatever_it_is_called(served: Served, tmp_path: Path) -> None:
    """A pickle as a body is never unpickled under any content type, by models that take anything,
    numbers or bytes, nor where `Accept` asks for it.
    """
    canary = tmp_path / "canary"
    pickled = pickle.dumps(Canary(str(canary)))
    bodies = [
        pickled,
        pickle.dumps(Canary(str(canary)), 0),
        cloudpickle.dumps(lambda: Canary(str(canary))),  # reading it is enough to have code made of it
        cloudpickle.dumps(Canary(str(canary))),
        msgspec.msgpack.encode({"nd": True, "kind": "O", "data": pickled}),  # what msgpack-numpy would read
        msgspec.msgpack.encode(pickled),
        b"\x93NUMPY\x01\x00v\x00{'descr': '|O', 'fortran_order': False, 'shape': (1,), }".ljust(128) + pickled,
        msgspec.json.encode({"py/reduce": [{"py/function": "os.mkdir"}, {"py/tuple": [str(canary)]}]}),
    ]
    for model in ("echo", "double", "size"):
        for kind in CONTENT_TYPES:
            for body in bodies:
                status, *_ = served.ask("POST", f"/models/{model}/predict", body, content_type=kind, accept=kind)
                assert status in (200, 400, 415, 422), (model, kind)
    assert not canary.exists()
    assert served.ask("POST", "/models/double/predict", 21)[1] == b"42.0"
    assert [line for line in served.log if "CODE FROM BYTES" in line] == []


def test_http_never_reads_an_exception_of_the_model(tmp_path: Path) -> None:
    """An exception that comes from a worker as a pickle is opened by Python callers only: no
    answer, health check or log does.
    """
    canary = tmp_path / "canary"
    stage = carpool.Stage(models.Sings, kwargs={"path": str(canary)})
    with serving(App(carpool.Service(stage, name="fails"), idle_check_s=0.0, debug=True)) as running:
        assert predict(running.port, "x").status == 500
        with Client(running.port) as client:
            assert client.ask(get("/readyz")).status == 503
    assert not canary.exists()
    with carpool.Service(stage).run() as service:
        with pytest.raises(carpool.ModelError) as caught:
            service.predict("x")
        assert caught.value.__cause__ is None  # a folder is no exception
    assert canary.exists()


def test_the_canary_sings() -> None:
    """If the canary were unpickled, both of its signs would be seen."""
    code = textwrap.dedent(PROGRAM).partition("def echo")[0] + "import pickle; pickle.loads(sys.stdin.buffer.read())"
    done = subprocess.run(
        [sys.executable, "-c", code], input=pickle.dumps(Canary("/nowhere/at/all")), capture_output=True, check=False
    )
    assert b"CODE FROM BYTES" in done.stderr
    assert b"FileNotFoundError" in done.stderr
    done = subprocess.run(
        [sys.executable, "-c", code], input=cloudpickle.dumps(lambda: 0), capture_output=True, check=True
    )
    assert b"CODE FROM BYTES ('cloudpickle" in done.stderr
