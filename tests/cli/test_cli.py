"""The command line: help that teaches, one clear line for each mistake, signals, logs."""

from __future__ import annotations

import gzip
import json
import logging
import os
import re
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import carpool
from carpool.cli import main, wants_json
from carpool.cli.serve_command import in_short, print_summary
from carpool.cli.sources import find_service
from carpool.engine.logger import GuardedLogger
from carpool.engine.observe import log
from carpool.engine.observe.log import JsonLines, TextLines
from carpool.http import App
from carpool.http.server import Server
from carpool.service.settings import with_defaults
from tests.effort import slow_where
from tests.support import models
from tests.support.prepared import carpool_command
from tests.support.prepared import run as run_python
from tests.support.serving import serve
from tests.support.sources import ROOT

LIGHT = "tests.support.serving_models"
"""A module that is imported in a fraction of the two seconds that the examples' scikit-learn takes."""


def run(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")]))
    return carpool_command(*arguments, cwd=cwd, PYTHONPATH=path)


def test_help_teaches() -> None:
    """`carpool --help` names the commands, what they do, and where to begin."""
    done = run("--help")

    assert done.returncode == 0
    assert "carpool demo" in done.stdout
    assert "Start with" not in run("demo", "--help").stdout
    for command, line in (("demo", "Serve handwritten"), ("serve", "Serve one or"), ("simulate", "Compare batching")):
        assert re.search(rf"{command} +{line}", done.stdout)


def test_help_names_nothing_that_is_not_installed(tmp_path: Path) -> None:
    """Where scikit-learn is not installed no help says to start with the demo, and no help names a
    module of the repository.
    """
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util\n"
        "find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *more: None if name == 'sklearn' else find(name, *more)\n"
    )
    helps = (["--help"], ["serve", "--help"], ["demo", "--help"], ["simulate", "--help"])
    program = (
        "import sys; from carpool.cli import main\n"
        f"for sys.argv[1:] in {helps}:\n"
        "    try: main()\n"
        "    except SystemExit as done: assert not done.code\n"
    )
    folders = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    shown = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True,
        env={**os.environ, "PYTHONPATH": folders},
    ).stdout  # fmt: skip
    assert shown.count("Usage: carpool") == len(helps)
    assert "Start with" not in shown
    assert "examples." not in shown


def test_extras_in_texts_exist() -> None:
    """Every `carpool[extra]` that a text of the package names can be installed, and `simulate` has
    the short name `sim`.
    """
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for path in (ROOT / "src").rglob("*.py"):
        for named in re.findall(r"carpool\[([\w,]+)\]", path.read_text()):
            assert set(named.split(",")) <= set(extras), path
    assert extras["sim"] == ["carpool[simulate]"]


def test_help_of_serve_has_an_example_and_every_option() -> None:
    """The help of `serve` has an example, and each option with its meaning and default."""
    text = run("serve", "--help").stdout

    for word in (
        "program:service",
        "--host",
        "--port",
        "--when-full",
        "--timeout-status",
        "--max-body-mb",
        "--log",
        "--log-level",
        "debug says now and",
    ):
        assert word in text


def test_the_level_of_the_log_hides_no_worker_s_line() -> None:
    """Lines below the chosen level are not shown, but what workers print is: their own loggers have
    the level already.
    """
    program = (
        "import logging; from carpool.engine.observe import log; log.set_up('text', logging.WARNING);"
        "logger = logging.getLogger('carpool'); logger.info('hidden'); logger.warning('shown');"
        "log.worker_line('Digits/0', True, 'WARNING mine: printed')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert [line.partition(" ")[2] for line in done.stderr.splitlines()] == [
        "warning: shown",
        "[Digits/0] WARNING mine: printed",
    ]


def test_at_level_debug_the_policy_explains_itself() -> None:
    """With `--log-level debug` the log says why batches go."""
    with serve("tests.support.serving_models:talks", "--log-level", "debug") as served:
        served.ask("POST", "/predict", "hello")
    lines = [json.loads(line) for line in served.log]
    assert any(line["level"] == "debug" and "stage Talks: a batch of 1 goes" in line["message"] for line in lines)


def test_a_server_does_not_wait_for_the_simulator() -> None:
    """Whoever serves, or asks a server, does not import the simulator."""
    command = [sys.executable, "-X", "importtime", "-m", "carpool", "serve", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)

    assert "carpool.cli" in done.stderr
    assert "carpool.simulate" not in done.stderr


def test_version() -> None:
    """`--version` prints that of the package."""
    assert run("--version").stdout.strip() == carpool.__version__


@slow_where(lambda target: target not in ("nothing:service", "json:dumps"))
@pytest.mark.parametrize(
    ("target", "told"),
    [
        ("examples.nothing:service", "there is no module 'examples.nothing'"),
        ("nothing:service", "there is no module 'nothing' in "),
        ("examples/digits.py:service", "(write the name of the module, not that of its file)"),
        ("examples/digits.py", "write module:attribute, for example examples.digits:service"),
        (f"{LIGHT}:nothing", f"module '{LIGHT}' has no attribute 'nothing'; it has talks, prints, "),
        ("examples.digits:Digits", "examples.digits:Digits is of type type, not a carpool.Service; it has service"),
        ("json:dumps", "json:dumps is of type function, not a carpool.Service; it has no carpool.Service: write "),
    ],
)
def test_a_wrong_target_is_one_line(target: str, told: str) -> None:
    """A target that does not exist is reported in one line, with what there is."""
    done = run("serve", target)

    assert done.returncode == 2
    assert done.stderr.startswith("carpool: ")
    assert told in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("nonsense", "; see carpool --help\n"),
        ("scale Digits", "; see carpool scale --help\n"),
        ("services add", "; see carpool services add --help\n"),
        ("serve x:y --prot 1", "Did you mean --port?\n"),
    ],
)
def test_a_wrong_command_names_what_helps(command: str, told: str) -> None:
    """A command that cannot be read is one line, which ends with the place where its form is shown."""
    done = run(*command.split())

    assert done.returncode == 2
    assert done.stderr.startswith("carpool: ")
    assert done.stderr.replace('"', "").endswith(told)  # which some versions of cyclopts put around names
    assert done.stderr.count("\n") == 1


@slow_where(lambda options: options[0] not in ("--prot", "--when-full", "--workers", "--log"))
@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--prot", "1"], "Did you mean --port?"),
        (["--workers", "2"], "--set stages.NAME.workers=VALUE"),
        (["--slo-s=0.1"], "--set services.NAME.slo_s=VALUE"),
        (
            ["--log", "json", "--max-batch-size", "8"],
            "a setting of a stage; write --set stages.NAME.max_batch_size=VALUE",
        ),
        (["--port", "many"], "many"),
        (["--log-level", "loud"], "warning"),
        (["--when-full", "explode"], "refuse"),
        (["--max-body-mb", "0"], "max_body_mb must be"),
        (["--port", "99999"], "99999"),
    ],
)
def test_a_wrong_option_is_explained(options: list[str], told: str) -> None:
    """A wrong option is explained before anything starts."""
    done = run("serve", f"{LIGHT}:talks", *options)

    assert done.returncode != 0
    assert told in (done.stderr + done.stdout).replace('"', "")  # which some versions of cyclopts put around names
    assert "Traceback" not in done.stderr


def test_other_commands_have_no_settings_of_stages() -> None:
    """Only commands that take `--set` say that it is how an option is written."""
    done = run("top", "--workers", "2")

    assert done.returncode != 0
    assert "--set" not in done.stderr + done.stdout


@pytest.mark.fault("F28")
def test_a_port_in_use_is_one_line() -> None:
    """A port that is in use is reported in one line, with what to do, before models are loaded."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run("serve", f"{LIGHT}:talks", "--port", str(port))

    assert done.returncode == 2
    assert f"carpool: port {port} is in use on 127.0.0.1" in done.stderr
    assert "--port" in done.stderr


def test_a_public_address_without_keys_is_refused_in_one_line() -> None:
    """`carpool serve` does not start where everybody could ask, and says in one line what would do."""
    done = run("serve", f"{LIGHT}:talks", "--host", "0.0.0.0", "--port", "0")

    assert done.returncode == 2
    assert done.stderr.startswith("carpool: everybody who reaches 0.0.0.0:0 could ask")
    assert "--api-keys FILE" in done.stderr
    assert "--insecure" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
def test_a_host_that_is_not_ours_is_one_line() -> None:
    """The address of another machine cannot be listened on, which is reported in one line."""
    done = run("serve", "examples.digits:service", "--host", "192.0.2.1", "--port", "0", "--insecure")

    assert done.returncode == 2
    assert "192.0.2.1 is not an address of this machine" in done.stderr


@pytest.mark.slow
def test_two_services_of_one_name_are_refused() -> None:
    """Two services of one name are refused, since they would answer at one address."""
    done = run("serve", "examples.digits:service", "examples.pipeline:service")

    assert done.returncode == 2
    assert "two services are called 'digits'" in done.stderr


def test_a_model_that_cannot_load_ends_the_server(tmp_path: Path) -> None:
    """If a model cannot load, the server ends with the user's traceback and exit status 1."""
    (tmp_path / "broken.py").write_text(
        "import carpool\n"
        "class Broken(carpool.Model):\n"
        "    def setup(self): raise OSError('no weights here')\n"
        "    def predict(self, x): return x\n"
        "service = carpool.Service(Broken)\n"
    )

    done = run("serve", "broken:service", "--port", "0", cwd=tmp_path)

    assert done.returncode == 1
    assert "carpool: worker 0 of stage Broken could not start" in done.stderr
    assert "OSError: no weights here" in done.stderr


@pytest.fixture
def own_log(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give the test a log of its own, which is as it was afterwards."""
    monkeypatch.setattr(log, "_kept", None)
    monkeypatch.setattr(GuardedLogger, "keep", None)
    root, ours = logging.getLogger(), logging.getLogger("carpool")
    handlers, level = [*root.handlers], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    ours.setLevel(logging.NOTSET)


LOGS = """
import logging, logging.config, sys
from carpool.http.observer import access_logger
from carpool.engine.logger import logger
from carpool.engine.observe import log
log.set_up(sys.argv[1])
for again in range(2):
    {program}
    logger.info("one")
    access_logger.info("two")
    log.worker_line("M/0", False, "three")
log.flush()
"""
CHANGES_OF_LOGS = {
    "nothing": "",
    "dictConfig": "logging.config.dictConfig({'version': 1})",
    "root's level": "logging.config.dictConfig({'version': 1, 'root': {'level': 'ERROR'}})",
    "a handler of the root": "logging.config.dictConfig({'version': 1, 'handlers': {'h': {'class':"
    " 'logging.StreamHandler'}}, 'root': {'handlers': ['h'], 'level': 'INFO'}})",
    "nothing disabled": "logging.config.dictConfig({'version': 1, 'disable_existing_loggers': False, 'root': {}})",
    "a level of ours": "logging.config.dictConfig({'version': 1, 'root': {'level': 'ERROR'}, 'loggers':"
    " {'carpool': {'level': 'INFO'}}})",
    "a file": "logging.basicConfig(level='ERROR', filename='/dev/null', force=True)",
    "no handlers": "logging.getLogger().handlers.clear()",
    "disabled": "logging.getLogger('carpool').disabled = True",
}


def what_is_logged(change: str, format: str, folder: Path) -> str:
    """What a program logs that changes its logging while ours goes on."""
    program = folder / "logs.py"
    program.write_text(LOGS.format(program=change))
    done = run_python(str(program), format, env=os.environ)
    done.check_returncode()
    return done.stderr.decode()


@slow_where(lambda change, format: format == "json" and change != next(iter(CHANGES_OF_LOGS)))
@pytest.mark.parametrize("format", ["text", "json"])
@pytest.mark.parametrize("change", CHANGES_OF_LOGS)
def test_a_program_does_not_silence_the_log(change: str, format: str, tmp_path: Path) -> None:
    """Whatever a program does to its logging, and whenever, each line of ours is written once, in the format asked for,
    and so is what workers print and the access log.
    """
    lines = what_is_logged(CHANGES_OF_LOGS[change], format, tmp_path).splitlines()
    if format == "json":
        assert [json.loads(line)["message"] for line in lines] == ["one", "two", "three"] * 2
    else:
        assert [re.sub(r"^\S+ (\[M/0\] )?", "", line) for line in lines] == ["one", "two", "three"] * 2


def test_a_program_may_say_where_our_log_goes(tmp_path: Path) -> None:
    """Handlers that a program gives to our logger by its name have all of its lines, and nothing is written beside."""
    handler = {"class": "logging.FileHandler", "filename": str(tmp_path / "log")}
    config = {"version": 1, "handlers": {"h": handler}, "loggers": {"carpool": {"handlers": ["h"], "propagate": False}}}
    assert what_is_logged(f"logging.config.dictConfig({config})", "text", tmp_path) == ""
    assert (tmp_path / "log").read_text().split() == ["one", "two", "three"] * 2


def test_a_server_s_log_outlives_the_logging_of_its_program(tmp_path: Path) -> None:
    """The log of `carpool serve` is whole although its program and a model's `setup` set up logging of their own."""
    (tmp_path / "program.py").write_text(
        "import logging.config, carpool\n"
        "def silence(): logging.config.dictConfig({'version': 1, 'root': {'level': 'ERROR'}})\n"
        "silence()\n"
        "class Bad(carpool.Model):\n"
        "    def setup(self): silence()\n"
        "    def predict(self, x: int) -> int: raise ValueError('the reason')\n"
        "service = carpool.Service(carpool.Stage(Bad, run_in='thread'))\n"
    )
    with serve("program:service", "--access-log", "1", folder=tmp_path) as served:
        assert served.ask("POST", "/predict", 1)[0] == 500
        served.process.terminate()
        assert served.wait() == 0
    told = "".join(served.log)
    for what in ("ready on", "the reason", "POST /predict 500", "stopped"):
        assert what in told


@pytest.mark.usefixtures("own_log")
@pytest.mark.parametrize(
    ("arguments", "environ", "status", "told"),
    [
        (["broken:service"], {}, 1, "1 / 0\n    ~~^~~\nZeroDivisionError: division by zero"),
        (["nowhere:service"], {}, 2, "there is no module 'nowhere'"),
        ([f"{LIGHT}:talks", "--max-body-mb", "0"], {}, 2, "max_body_mb must be"),
        ([f"{LIGHT}:talks", "--prot", "1"], {}, 2, "Did you mean"),
        ([f"{LIGHT}:talks"], {"CARPOOL_PORT": "many"}, 2, "many"),
        ([f"{LIGHT}:talks", "--host", "0.0.0.0"], {}, 2, "everybody who reaches"),
    ],
)
def test_with_a_log_of_json_a_start_that_fails_is_one_line_of_json(
    arguments: list[str],
    environ: dict[str, str],
    status: int,
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Whatever keeps a server from starting, a log that is JSON has it in one line of JSON."""
    (tmp_path / "broken.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["carpool", "serve", *arguments, "--log", "json"])
    with pytest.raises(SystemExit) as ended:
        main()
    (line,) = capsys.readouterr().err.splitlines()
    entry = json.loads(line)
    assert (ended.value.code, entry["level"], entry["code"]) == (status, "critical", "startup_failed")
    assert told in entry["message"]


@pytest.mark.parametrize(
    ("arguments", "variable", "wants"),
    [
        (["serve", "m:s", "--log", "json"], None, True),
        (["worker", "m:s", "--log=json"], None, True),
        (["serve", "m:s"], "json", True),
        (["serve", "m:s", "--log", "text"], "json", False),
        (["serve", "m:s"], None, False),
        (["top", "--log", "json"], "json", False),
        ([], "json", False),
    ],
)
def test_json_is_wanted_by_option_or_variable(arguments: list[str], variable: str | None, wants: bool) -> None:
    """A flag counts before the variable, and both only for commands that have a log."""
    assert wants_json(arguments, {} if variable is None else {"CARPOOL_LOG": variable}) is wants


def test_an_import_that_fails_shows_its_own_traceback(tmp_path: Path) -> None:
    """If a module's import fails, its own traceback is shown: that is not the same as no module."""
    (tmp_path / "mistaken.py").write_text("import not_there\n")

    done = run("serve", "mistaken:service", cwd=tmp_path)

    assert done.returncode == 1
    assert "No module named 'not_there'" in done.stderr


@pytest.mark.parametrize("text", ["import helper\n", "def f(:\n", "1 / 0\n"])
def test_an_import_that_fails_shows_the_user_s_frames_only(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The traceback of a module that raises begins in that module."""
    name = f"failing_{abs(hash(text))}"
    (tmp_path / f"{name}.py").write_text(text)
    (tmp_path / "helper.py").write_text("{}['x']\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "helper", raising=False)
    with pytest.raises(SystemExit) as ended:
        find_service(f"{name}:service")

    assert ended.value.code == 1
    told = capsys.readouterr().err
    files = re.findall(r'File "(.*?)"', told)
    assert files[0] == str(tmp_path / f"{name}.py"), told
    assert not any("importlib" in file and "frozen" not in file for file in files), told
    assert told.endswith(f"carpool: module {name!r} cannot be imported\n")


def test_the_summary_says_what_a_limit_counts() -> None:
    """With `size=` the limit of a batch is a sum of sizes, and the summary does not call it items."""
    assert in_short(carpool.Stage(models.scale, max_batch_size=64)).startswith("batches of up to 64, ")
    weighed = carpool.Stage(models.scale, max_batch_size=4096, size=int)
    assert in_short(weighed).startswith("batches of up to 4096 in size, ")


def test_the_summary_says_whose_workers_there_are() -> None:
    """Workers that a stage starts are counted, and those that join it are named."""
    told = [
        in_short(carpool.Stage(models.scale, max_batch_size=4, workers=workers, join=join))
        for workers, join in ((1, False), ((1, 8), False), (2, True), (0, True))
    ]
    told = [text.removeprefix("batches of up to 4, ").removesuffix(", policy adaptive") for text in told]
    assert told == ["1 worker", "1 to 8 workers", "2 workers, and those that join", "workers that join"]


@pytest.mark.slow
def test_the_summary_says_what_is_served() -> None:
    """The summary shows at a glance what runs: address, models, stages, workers and policy."""
    command = [sys.executable, "-m", "carpool", "serve", "examples.digits:service", "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "NO_COLOR": "1"})
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(line)
        if "ready on" in line:
            break
    process.terminate()
    rest = process.stderr.read()
    process.stderr.close()

    assert process.wait(timeout=20) == 0
    text = "".join(lines)
    assert f"carpool {carpool.__version__} on http://127.0.0.1:" in text
    assert "digits" in text
    assert "stage Digits: batches of up to 64, 1 worker, policy adaptive" in text
    assert "SIGTERM: no new requests; finishing those inside" in rest
    assert "stopped" in rest


def test_the_summary_shows_the_address_that_answers(capsys: pytest.CaptureFixture[str]) -> None:
    """A name that an address cannot hold as it is stands there as the route has it."""
    other = carpool.Service(models.Talks, name="a model/2", routes={"/talk": None})
    app = App(carpool.Service(models.Talks), other)

    print_summary(Server(app), with_defaults({}))

    assert "POST /models/a%20model%2F2/predict, /talk" in capsys.readouterr().err


def test_json_logs_are_json() -> None:
    """With `--log json` each line is one object, also for what workers print."""
    with serve("tests.support.serving_models:talks") as served:
        status, body, _ = served.ask("POST", "/predict", "hi\x1b[31m")
        assert (status, json.loads(body)) == (200, "hi\x1b[31m")

    lines = [json.loads(line) for line in served.log]
    printed = [line for line in lines if line["logger"] == "carpool.worker"]
    assert {line["worker"] for line in printed} == {"Talks/0"}
    assert {"time", "level", "logger", "message"} <= set(lines[0])
    assert any(line["message"] == "printed hi\\x1b[31m" for line in printed)  # control characters are made visible
    assert served.process.returncode == 0

    start = lines[0]
    assert (start["level"], start["address"]) == ("info", f"http://127.0.0.1:{served.port}")
    assert start["message"] == f"carpool {carpool.__version__} starts Talks on {start['address']}"
    stages = {"Talks": "single items, 1 worker"}
    assert start["serves"] == [{"model": "Talks", "path": "/predict", "stages": stages}]
    ready = [line for line in lines if line["message"].startswith("worker Talks/0") and "ready" in line["message"]]
    assert [(line["model"], line["stage"], line["worker"]) for line in ready] == [("Talks", "Talks", "Talks/0")]
    assert [line["address"] for line in lines if line["message"].startswith("ready on")] == [start["address"]]


def test_fields_of_a_line_are_json_and_no_part_of_its_text() -> None:
    """What a line is about are fields of their own in JSON, without control characters; for people
    only what a worker has printed begins with the worker's name.
    """
    about = {"model": "digits\x1b[2J", "worker": "Digits/0", "requests": 21, "unknown": 1}
    record = logging.makeLogRecord(
        {"name": "carpool", "levelname": "INFO", "levelno": logging.INFO, "msg": "told", **about}
    )
    line = json.loads(JsonLines().format(record))
    assert {name: line.get(name) for name in ("model", "worker", "requests", "unknown", "message")} == {
        "model": "digits\\x1b[2J",
        "worker": "Digits/0",
        "requests": 21,
        "unknown": None,
        "message": "told",
    }
    assert TextLines().format(record).endswith(" told")
    assert "[" not in TextLines().format(record)
    record.name = "carpool.worker"
    assert TextLines().format(record).endswith(" [Digits/0] told")


def test_serve_speaks_the_protocols_that_are_chosen(tmp_path: Path) -> None:
    """`--protocol` chooses protocols, and `--accept-compressed` lets bodies be compressed."""
    (tmp_path / "program.py").write_text(PROGRAM_OF_ONE)
    with serve("program:service", "--protocol", "kserve-v1", "--accept-compressed", folder=tmp_path) as served:
        body = gzip.compress(b'{"instances": [1, 2]}')
        status, answer, _ = served.ask("POST", "/v1/models/double:predict", body, content_encoding="gzip")
        assert (status, json.loads(answer)) == (200, {"predictions": [2.0, 4.0]})
        assert served.ask("GET", "/v2")[0] == 404


PROGRAM_OF_ONE = """
import carpool

def double(x: float) -> float:
    return 2 * x

service = carpool.Service(double)
"""


def test_a_folder_that_is_gone_is_one_line(tmp_path: Path) -> None:
    """A command in a folder that has been deleted says so in one line, and so does a program's service."""
    program = (
        "import os, sys, tempfile; folder = tempfile.mkdtemp(); os.chdir(folder); os.rmdir(folder);"
        " os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    )
    served = (
        "import carpool\ndef f(x: int) -> int: return x\n"
        "try: carpool.Service(carpool.Stage(f)).run().__enter__()\nexcept carpool.StartupError as error: print(error)"
    )
    script = tmp_path / "served.py"  # in a deleted folder Python 3.13.0 cannot import socket for a program of `-c`
    script.write_text(served)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    for arguments in (["-m", "carpool", "config"], [str(script)]):
        command = [sys.executable, "-c", program, *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False, timeout=60)
        (line,) = (done.stdout + done.stderr).splitlines()
        assert "the current folder has been deleted" in line


@pytest.mark.parametrize(
    ("target", "told"),
    [
        ("../p8/wine.py:service", "go to its folder (cd ../p8) and write wine:service"),
        ("./wine:service", "is a path, and modules have names: write wine:service"),
        (".wine:service", "is a path, and modules have names: write wine:service"),
    ],
)
def test_a_path_is_no_module(target: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Who names a file by its path is told what to write."""
    with pytest.raises(SystemExit):
        find_service(target)
    assert told in capsys.readouterr().err
