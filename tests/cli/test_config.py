"""ServerSettings from flags, the environment and a file: one schema, one order, and errors that name the nearest."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import pytest

import carpool
from carpool.cli.sources import read, server_url, values
from carpool.service.overrides import OF_A_SERVICE, OF_A_STAGE, changed
from carpool.service.settings import LISTS, NAMES, AnswerSettings, ServerOptions, ServerSettings, with_defaults
from tests.effort import slow_where
from tests.support import models
from tests.support.prepared import carpool_command
from tests.support.sources import ROOT


def found(folder: Path, environ: dict[str, str] | None = None, *sets: str) -> dict[str, Any]:
    """The values of the environment and the file."""
    config = read(environ or {}, folder, None, sets)
    return {name: each.value for name, each in config.settings.items()}


def test_the_environment_counts_before_the_file(tmp_path: Path) -> None:
    """What both say is as the environment says, and each says where it is from."""
    (tmp_path / "carpool.toml").write_text('port = 1\nwhen-full = "wait"\nallow_host = ["a", "b"]\n')
    config = read({"CARPOOL_PORT": "2"}, tmp_path)
    assert {name: (each.value, each.source) for name, each in config.settings.items()} == {
        "port": ("2", "environment"),
        "when_full": ("wait", "carpool.toml"),
        "allow_host": (["a", "b"], "carpool.toml"),
    }


def test_a_table_of_pyproject_is_as_good_as_a_file(tmp_path: Path) -> None:
    """[tool.carpool] counts where there is no carpool.toml; without the table the file says nothing."""
    (tmp_path / "pyproject.toml").write_text("[tool.other]\nx = 1\n")
    assert found(tmp_path) == {}
    (tmp_path / "pyproject.toml").write_text("[tool.carpool]\nport = 3\n")
    assert found(tmp_path) == {"port": 3}
    (tmp_path / "carpool.toml").write_text("port = 4\n")
    assert found(tmp_path) == {"port": 4}


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("prot = 1", "carpool.toml has 'prot', which is no setting; did you mean 'port'?"),
        ("max_conections = 1", "did you mean 'max_connections'?"),
        ("port = ", "carpool.toml is no TOML"),
        ("stages = 3", "stages in carpool.toml must be tables"),
    ],
)
def test_a_wrong_file_is_one_clear_line(tmp_path: Path, text: str, error: str) -> None:
    """An unknown key names the nearest right one, and what is no TOML says where."""
    (tmp_path / "carpool.toml").write_text(text)
    with pytest.raises(ValueError, match=re.escape(error)) as caught:
        found(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_variable_that_is_empty_is_named(tmp_path: Path) -> None:
    """A variable without a value is an error that names it, unless no text is a value of its setting."""
    for name in NAMES:
        variable = f"CARPOOL_{'api_keys_file' if name == 'api_keys' else name}".upper()
        if getattr(ServerOptions(), name) in ("", ()):
            assert found(tmp_path, {variable: ""}) == {name: ""}
        else:
            with pytest.raises(ValueError, match=f"{variable} is empty"):
                found(tmp_path, {variable: ""})


@pytest.mark.parametrize(
    "value", ["2", "[1, 3]", "[[0], [0, 1]]", '{FLAGS = "-a -b"}', '"a b"', "a b", "two  words and = signs"]
)
def test_values_in_the_environment_may_have_spaces(tmp_path: Path, value: str) -> None:
    """A value in CARPOOL_SET goes on to the next setting, whatever is in it, and is as in TOML, as behind --set."""
    text = f" stages.two steps.env={value}  services.s.timeout-s={value}\nstages.S.workers={value} "
    (expected,) = read({}, tmp_path, None, [f"stages.x.y={value}"]).stages["x"].values()
    config = read({"CARPOOL_SET": text}, tmp_path)
    assert config.stages["two steps"]["env"].value == expected.value
    assert config.services["s"]["timeout_s"].value == expected.value
    assert config.stages["S"]["workers"].value == expected.value


def test_variables_of_others_do_no_harm(tmp_path: Path) -> None:
    """What Kubernetes sets for a service called carpool is passed over; an unknown variable is told and not fatal."""
    environ = {"CARPOOL_PORT": "tcp://10.0.0.1:80", "CARPOOL_SERVICE_HOST": "10.0.0.1", "CARPOOL_PORT_80_TCP": "x"}
    config = read(environ | {"CARPOOL_WORKER": "1", "CARPOOL_API_KEYS": "a:secret", "CARPOOL_HOTS": "x"}, tmp_path)
    assert config.settings == {}
    assert config.doubts == ["CARPOOL_HOTS in the environment is no setting; did you mean 'host'?"]
    assert found(tmp_path, {"CARPOOL_API_KEYS_FILE": "keys"}) == {"api_keys": "keys"}


def test_stages_and_services_can_be_set_from_outside(tmp_path: Path) -> None:
    """A flag counts before the environment and that before the file, setting by setting."""
    (tmp_path / "carpool.toml").write_text(
        "[stages.double]\nworkers = 2\nmax_batch_size = 4\n[services.double]\nslo_s = 0.5\n"
    )
    sets = {"CARPOOL_SET": "stages.double.workers=3 stages.double.max-queue-size=9"}
    config = read(sets, tmp_path, None, ["stages.double.workers=4"])
    assert values(config.stages) == {"double": {"workers": 4, "max_batch_size": 4, "max_queue_size": 9}}
    assert values(config.services) == {"double": {"slo_s": 0.5}}
    for wrong in ("stages.double=3", "double.workers=3", "stages.double.workers"):
        with pytest.raises(ValueError, match=r"write stages\.NAME\.SETTING=VALUE"):
            read({}, tmp_path, None, [wrong])


def many(xs: list[float]) -> list[float]:
    return [2 * x for x in xs]


def test_a_changed_service_is_the_declared_one_but_for_what_is_changed() -> None:
    """ServerSettings that nothing changes stay, services that nothing changes are the same objects, and the changed one
    works.
    """
    service = carpool.Service(
        carpool.Stage(many, max_batch_size=8, workers=2, max_queue_size=50, run_in="thread"),
        name="m",
        timeout_s=None,
        routes={"/other": None},
    )
    other = carpool.Service(carpool.Stage(models.double, run_in="thread"))
    (new, same) = changed([service, other], {"m": {"slo_s": 0.25}}, {"many": {"workers": 1, "policy": "greedy"}})
    assert same is other
    assert (new.slo_s, new.timeout_s, new.name) == (0.25, float("inf"), "m")
    assert [route.path for route in new.routes] == ["/other"]
    (stage,) = new.stages
    assert (stage.workers, stage.policy, stage.max_batch_size, stage.max_queue_size) == (1, "greedy", 8, 50)
    with new.run() as running:
        assert running.predict(4.0) == 8.0
    assert changed([service], {}, {"m/many": {"workers": 3}})[0].stages[0].workers == 3


@pytest.mark.parametrize(
    ("services", "stages", "error"),
    [
        ({}, {"mayn": {"workers": 1}}, "there is no stage 'mayn'; did you mean 'many'?"),
        ({}, {"many": {"worker": 1}}, "a stage has no setting 'worker'; did you mean 'workers'?"),
        ({"manny": {"slo_s": 1}}, {}, "there is no service 'manny'; did you mean 'many'?"),
        ({"many": {"slo": 1}}, {}, "a service has no setting 'slo'; did you mean 'slo_s'?"),
        ({}, {"many": {"workers": 0}}, "workers"),
        ({}, {"many": {"policy": "adaptve"}}, "adaptive"),
        ({}, {"many": {"max_batch_size": "none"}}, "max_batch_size cannot be none: many takes batches"),
        ({}, {"many": {"max_queue_size": "none"}}, "max_queue_size must be a whole number of at least 1, not 'none'"),
    ],
)
def test_wrong_changes_name_the_nearest(services: Any, stages: Any, error: str) -> None:
    """A name that there is not is an error with the nearest that there is; a wrong value is refused as in code."""
    service = carpool.Service(carpool.Stage(many, max_batch_size=8, run_in="thread"))
    with pytest.raises(ValueError, match=re.escape(error)):
        changed([service], services, stages)


def test_none_takes_a_setting_away() -> None:
    """The text `none`, which is how `carpool config` shows what is not given, is read as None."""
    service = carpool.Service(
        carpool.Stage(many, max_batch_size=8, policy="greedy", max_batch_time_s=9.0, run_in="thread"),
        slo_s=0.5,
        timeout_s=3.0,
    )
    of_stage = {"policy": "none", "max_batch_time_s": "none", "max_rows": "none"}
    (new,) = changed([service], {"many": {"slo_s": "none", "timeout_s": "none"}}, {"many": of_stage})
    (stage,) = new.stages
    assert (new.slo_s, new.timeout_s) == (None, float("inf"))
    assert (stage.policy, stage.max_batch_time_s) == (None, carpool.Stage(many, max_batch_size=8).max_batch_time_s)


def test_workers_with_things_of_their_own_are_not_multiplied() -> None:
    """Another number of workers keeps an environment that all share and devices; cpus and different environments must
    be changed, too.
    """
    shared = carpool.Service(carpool.Stage(many, max_batch_size=8, workers=2, env={"A": "1"}))
    assert changed([shared], {}, {"many": {"workers": 3}})[0].stages[0].env == ({"A": "1"},) * 3
    own = carpool.Service(carpool.Stage(many, max_batch_size=8, env=[{"A": "1"}, {"A": "2"}]))
    with pytest.raises(ValueError, match="different env"):
        changed([own], {}, {"many": {"workers": 3}})
    tied = carpool.Service(carpool.Stage(many, max_batch_size=8, cpus=[0]))
    with pytest.raises(ValueError, match="change cpus with workers"):
        changed([tied], {}, {"many": {"workers": 2}})


def test_each_setting_is_described_once() -> None:
    """The docstrings of the schemas have their names in their order, and flags have their types and defaults."""
    assert set(NAMES) >= LISTS
    docs = [inspect.getdoc(schema) or "" for schema in (ServerSettings, AnswerSettings)]
    described = [name for text in docs for name in re.findall(r"^    (\w+): ", text, re.MULTILINE)]
    assert described == list(NAMES)
    assert get_type_hints(ServerOptions) == get_type_hints(ServerSettings)
    assert vars(ServerOptions()) == with_defaults({})


def test_a_setting_that_there_is_not() -> None:
    """It is an error that lists those that there are."""
    with pytest.raises(TypeError, match=r"no setting 'prot'; there are host, port, "):
        with_defaults({"prot": 1})  # type: ignore[typeddict-unknown-key]


def test_the_settings_of_stages_and_services_exist() -> None:
    """What can be changed from outside is there."""
    assert {each.name for each in fields(carpool.Stage)} >= set(OF_A_STAGE)
    assert {each.name for each in fields(carpool.Service)} >= set(OF_A_SERVICE)


def test_the_document_lists_every_setting() -> None:
    """docs/configuration.md names each setting of the server, of a stage and of a service."""
    text = (ROOT / "docs" / "configuration.md").read_text()
    for name in (*NAMES, *OF_A_STAGE, *OF_A_SERVICE):
        assert f"`{name}`" in text, name


def command(*arguments: str, cwd: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")]))
    return carpool_command(*arguments, cwd=cwd, **{"PYTHONPATH": path, "COLUMNS": "200", **environ})


def test_config_shows_values_and_where_they_are_from(tmp_path: Path) -> None:
    """`carpool config` shows every setting with its value and source; flags come first, then the environment, the
    file and the default.
    """
    (tmp_path / "carpool.toml").write_text(
        'port = 1\nhost = "127.0.0.9"\nidle_timeout_s = 5\n[stages.double]\nworkers = 3\n'
    )
    done = command("config", "--port", "7", cwd=tmp_path, CARPOOL_HOST="127.0.0.3", CARPOOL_ALLOW_HOST="a,b")
    assert done.returncode == 0, done.stderr
    lines = [re.sub(" +", " ", line) for line in done.stdout.splitlines()]
    for line in ("port = 7 # flag", 'host = "127.0.0.3" # environment', "idle_timeout_s = 5.0 # carpool.toml"):
        assert line in lines
    assert 'allow_host = ["a", "b"] # environment' in lines
    assert "max_connections = 1024 # default" in lines
    assert "stages.double.workers = 3 # carpool.toml" in lines


EVERYTHING = """
import carpool
from carpool.engine.policy import Static

class Many(carpool.Model):
    def predict(self, xs: list[int]) -> list[int]:
        return xs

class Parts(carpool.Model):
    def predict(self, x: int):
        yield x

a = carpool.Service(
    carpool.Stage(Many, name="one", max_batch_size=8, workers=(1, 3), env={"A": 'b "c" \\n'}, cpus=[{0}, {0}, {0}],
                  allowed_batch_sizes=[4, 8], max_queue_bytes=2000, max_batch_time_s=5),
    carpool.Stage(Many, name="a.b/c", max_batch_size=4, policy="greedy", idempotent=False),
    name="a b", slo_s=0.1, share=0.5, max_parallel_starts=2)
b = carpool.Service(carpool.Stage(Parts, max_rows=4, devices=[0, 1]), part_slo_s=0.1, timeout_s=None, max_stream_s=9)
c = carpool.Service(carpool.Stage(Many, name="own", max_batch_size=8, policy=Static(max_queue_delay_s=0.01)), name="c")
"""


def test_what_config_shows_can_be_set(tmp_path: Path) -> None:
    """The lines of `carpool config` are a file that changes nothing, whatever stages and services say; only a policy
    that is an object is a comment.
    """
    (tmp_path / "every.py").write_text(EVERYTHING)
    shown = command("config", "every:a", "every:b", "every:c", cwd=tmp_path, CARPOOL_PORT="9")
    assert shown.returncode == 0, shown.stderr
    assert "# stages.own.policy is static, which only code can say" in shown.stdout
    (tmp_path / "carpool.toml").write_text("\ufeff" + shown.stdout)
    again = command("config", "every:a", "every:b", "every:c", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    before, after = (re.sub("  # .*", "", each.stdout).splitlines() for each in (shown, again))
    assert before == after
    assert len(before) > len(NAMES)


@pytest.mark.parametrize("word", ["none", "None"])
def test_none_switches_off_what_code_may_leave_out(word: str) -> None:
    """TOML has no word for None, so the text says it, where code may say None; elsewhere it is refused."""
    service = carpool.Service(
        carpool.Stage(many, max_batch_size=8, max_queue_delay_s=0.1, max_batch_time_s=3, env={"A": "b"}), slo_s=0.1
    )
    of_stage = dict.fromkeys(("max_queue_delay_s", "max_batch_time_s", "env", "policy"), word)
    (new,) = changed([service], {"many": {"slo_s": word, "timeout_s": word}}, {"many": of_stage})
    assert (new.slo_s, new.timeout_s) == (None, float("inf"))
    (stage,) = new.stages
    assert (stage.max_queue_delay_s, stage.max_batch_time_s, [*stage.env]) == (None, None, [{}])
    for services, stages, place in (
        ({"many": {"share": word}}, {}, "services.many.share: "),
        ({}, {"many": {"max_queue_size": word}}, "stages.many.max_queue_size: "),
        ({}, {"many/many": {"max_batch_size": word}}, "stages.many/many.max_batch_size: "),
    ):
        with pytest.raises((ValueError, TypeError), match=f"^{re.escape(place)}"):
            changed([service], services, stages)


@pytest.mark.parametrize(("text", "workers"), [("1-8", (1, 8)), (" 2 - 3 ", (2, 3)), ("4", 4)])
def test_workers_are_written_as_for_scale(text: str, workers: Any) -> None:
    """The number of workers of a stage is written from outside as `carpool scale` takes it."""
    service = carpool.Service(carpool.Stage(many, max_batch_size=8))
    assert changed([service], {}, {"many": {"workers": text}})[0].stages[0].workers == workers
    with pytest.raises(ValueError, match=r"^stages\.many\.workers: workers"):
        changed([service], {}, {"many": {"workers": "8-1"}})
    with pytest.raises((ValueError, TypeError), match=r"^stages\.many\.workers: workers"):
        changed([service], {}, {"many": {"workers": "a few"}})


def test_a_list_for_each_worker_says_how_many_there_are() -> None:
    """Cores or variables for each of several workers make as many workers, if nothing else says how many."""
    service = carpool.Service(carpool.Stage(many, max_batch_size=8))
    for changes in ({"cpus": [[0], [0]]}, {"env": [{"A": "1"}, {"A": "2"}]}):
        assert changed([service], {}, {"many": changes})[0].stages[0].workers == 2


@slow_where(lambda text: text in ("CARPOOL_LOG", "CARPOOL_DEBUG", "CARPOOL_PORT") or "slo_s" in text)
@pytest.mark.parametrize(
    ("environ", "text"),
    [
        ({"CARPOOL_PORT": "many"}, "CARPOOL_PORT"),
        ({"CARPOOL_LOG": "xml"}, "CARPOOL_LOG"),
        ({"CARPOOL_DEBUG": "mayb"}, "CARPOOL_DEBUG"),
        ({"CARPOOL_PORT": "70000"}, "CARPOOL_PORT"),
        ({"CARPOOL_MAX_BODY_MB": "nan"}, "CARPOOL_MAX_BODY_MB: max_body_mb must be"),
        ({"CARPOOL_SET": "stages.own.workers=0"}, "CARPOOL_SET stages.own.workers: workers must be"),
        ({"CARPOOL_SET": 'services.c.slo_s="soon"'}, "CARPOOL_SET services.c.slo_s: slo_s must be"),
        ({"CARPOOL_CONFIG": "other.toml"}, "stages.own.max_queue_size in other.toml: max_queue_size must be"),
    ],
)
def test_a_wrong_value_names_its_place(tmp_path: Path, environ: dict[str, str], text: str) -> None:
    """A value that is of the wrong kind, or out of range, is an error of one line that says where it stands."""
    (tmp_path / "every.py").write_text(EVERYTHING)
    (tmp_path / "other.toml").write_text("[stages.own]\nmax_queue_size = 0\n")
    done = command("serve", "every:c", cwd=tmp_path, **environ)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert text in line


@pytest.mark.parametrize(
    ("environ", "url"),
    [
        ({}, "http://127.0.0.1:8000"),
        ({"CARPOOL_PORT": "1"}, "http://127.0.0.1:1"),
        ({"CARPOOL_PORT": "1", "CARPOOL_HOST": "::"}, "http://[::1]:1"),
        ({"CARPOOL_HOST": "0.0.0.0", "CARPOOL_TLS_CERT": "c.pem"}, "https://127.0.0.1:8000"),
        ({"CARPOOL_ADMIN_ADDRESS": "127.0.0.1:2"}, "http://127.0.0.1:2"),
        ({"CARPOOL_ADMIN_ADDRESS": "unix:a.sock", "CARPOOL_SOCKET": "b.sock"}, "unix:a.sock"),
        ({"CARPOOL_SOCKET": "b.sock"}, "unix:b.sock"),
    ],
)
def test_commands_ask_where_a_server_would_listen(
    environ: dict[str, str], url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Commands for a running server ask the one that `carpool serve` would start here, unless they are given a URL;
    those for probes do not ask the address that is for operators.
    """
    monkeypatch.chdir(tmp_path)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert server_url(None) == url
    assert server_url("http://here") == "http://here"
    if "CARPOOL_ADMIN_ADDRESS" in environ:
        assert server_url(None, admin=False) in ("unix:b.sock", "http://127.0.0.1:8000")


def test_key_makes_a_line_that_serve_takes(tmp_path: Path) -> None:
    """`carpool key` prints the line for the file on its output, and the key itself beside it."""
    done = command("key", "alice", "--expires", "2999-01-01", cwd=tmp_path)
    assert re.fullmatch(r"alice:sha256:[0-9a-f]{64} expires=2999-01-01\n", done.stdout)
    assert re.fullmatch(r"key:  cp_[\w-]{43}\n", done.stderr)
    assert command("key", "a b", cwd=tmp_path).returncode == 2
