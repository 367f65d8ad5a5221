"""The files of deploy/: every metric and setting that they name exists, and what they say fits what carpool does."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from carpool.cli.sources import read
from carpool.engine.observe.prometheus import CallerMetrics, render
from carpool.service.settings import NAMES
from tests.support.sources import ROOT

DEPLOY = ROOT / "deploy"
_WORDS = re.compile(r"carpool_[a-z_]+")
_SUFFIXES = ("_total", "_bucket", "_sum", "_count", "_created")


@pytest.fixture(scope="module")
def metrics() -> dict[str, set[str]]:
    """The labels of each metric that /metrics can have, by the name of its samples."""
    from carpool.engine.core.batcher import Batcher
    from carpool.engine.core.core import Core
    from carpool.engine.core.queue import Queue
    from carpool.engine.core.roster import Roster
    from carpool.engine.observe.stats import Stats
    from carpool.engine.policy import Adaptive

    core = Core([Batcher("s", Adaptive(8), Queue(8))])
    stats = Stats("m", core, [Roster(1, lambda: 0.5)], [False], slo_s=1.0)
    text = render([stats], 0.0, more=[CallerMetrics({"alice": 1}, 1)])[0].decode()
    families = re.findall(r"^# HELP (\w+)", text, re.MULTILINE)
    found = {name: set[str]() for family in families for name in (family, *(family + each for each in _SUFFIXES))}
    for name, labels in re.findall(r"^(\w+)\{(.*)\} ", text, re.MULTILINE):
        found.setdefault(name, set()).update(re.findall(r'(\w+)="', labels))
    source = (ROOT / "src/carpool/engine/observe/prometheus.py").read_text()
    for family in re.findall(r'"(carpool_\w+)"', source):
        for name in (family, *(family + each for each in _SUFFIXES)):
            found.setdefault(name, set())
    for name in ("first_part", "part", "longest_gap"):
        for suffix in ("", *_SUFFIXES):
            found.setdefault(f"carpool_{name}_seconds{suffix}", set())
    return found


def expressions() -> list[str]:
    """All expressions of the alerts and of the board, and the query of the autoscaler."""
    board = json.loads((DEPLOY / "grafana.json").read_text())
    found = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    for name in ("alerts.yaml", "kubernetes.yaml"):
        text = (DEPLOY / name).read_text()
        found += [" ".join(each.split()) for each in re.findall(r"(?:expr|query): >-\n((?: {10,}.*\n)+)", text)]
        found += re.findall(r"expr: (?!>-)(.+)", text)
    return found


def test_there_are_expressions() -> None:
    """The readers of this test find what there is."""
    assert len(expressions()) > 30


@pytest.mark.parametrize("expression", expressions())
def test_every_metric_that_is_named_exists(expression: str, metrics: dict[str, set[str]]) -> None:
    """An expression names only metrics that /metrics has, and its brackets are closed."""
    named = [name for name in _WORDS.findall(expression) if name != "carpool_"]
    assert named or "up{" in expression
    for name in named:
        assert name in metrics, f"{expression} names {name}"
    for opening, closing in ("()", "{}", "[]"):
        assert expression.count(opening) == expression.count(closing)


def test_every_label_that_is_asked_for_exists(metrics: dict[str, set[str]]) -> None:
    """An alert selects by labels that its metric has."""
    for expression in expressions():
        for name, selector in re.findall(r"(carpool_\w+)\{([^}]*)\}", expression):
            asked = set(re.findall(r"(\w+)\s*=~?", selector)) - {"instance", "job"}
            known = metrics[name] | {"model", "stage"}
            assert asked <= known, (expression, asked - known)


def test_the_names_of_others_are_mapped_from_names_that_exist(metrics: dict[str, set[str]]) -> None:
    """The table of docs/operating.md, and each alert in it, name what there is."""
    text = (ROOT / "docs" / "operating.md").read_text()
    for name in re.findall(r"`(carpool_\w+)", text):
        assert name in metrics, name
    alerts = set(re.findall(r"alert: (\w+)", (DEPLOY / "alerts.yaml").read_text()))
    assert set(re.findall(r"^\| `(Carpool\w+)`", text, re.MULTILINE)) == alerts


def test_settings_in_the_files_exist(tmp_path: Path) -> None:
    """The example of carpool.toml is understood, and each flag of the other files is one."""
    config = read({}, tmp_path, str(DEPLOY / "carpool.toml"))
    assert config.settings["admin_address"].value == "127.0.0.1:9000"
    flags = {f"--{name.replace('_', '-')}" for name in NAMES} | {"--config"}
    for name in ("Dockerfile", "carpool.service", "kubernetes.yaml", "nginx.conf", "carpool.socket"):
        lines = [line for line in (DEPLOY / name).read_text().splitlines() if "docker" not in line]
        ours = [line for line in lines if re.search(r"carpool|serve|CMD|- --", line) and "HEALTHCHECK" not in line]
        for flag in re.findall(r"(--[a-z-]+)", "\n".join(ours)):
            if flag not in ("--from", "--no-cache-dir", "--live", "--model"):
                assert flag in flags, (name, flag)


def parsed(name: str) -> list[Any]:
    yaml = pytest.importorskip("yaml")
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


def test_the_manifests_say_what_they_must() -> None:
    """Pods run as nobody with a read-only root, serve on after SIGTERM until they get no more requests, have longer to
    end than that and the drain take, and are probed at addresses that need no key.
    """
    (deployment,) = [each for each in parsed("kubernetes.yaml") if each["kind"] == "Deployment"]
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    (secret,) = [volume["secret"] for volume in pod["volumes"] if "secret" in volume]
    assert secret["defaultMode"] & 0o040
    assert pod["securityContext"]["fsGroup"] == pod["securityContext"]["runAsGroup"]  # or nobody could read it
    assert pod["enableServiceLinks"] is False
    (delay,) = [flag.partition("=")[2] for flag in container["args"] if flag.startswith("--drain-delay-s=")]
    assert pod["terminationGracePeriodSeconds"] > float(delay) + 30 + 5
    assert container["livenessProbe"]["httpGet"] == {"path": "/livez", "port": "admin"}  # no crowd of clients is there
    assert container["readinessProbe"]["httpGet"]["path"] == "/readyz"
    assert "--open-readyz" in container["args"]


def test_the_files_for_ray_name_what_there_is() -> None:
    """The manifest serves an application that program.py has, with the deployment's own name, by the image that the
    Dockerfile makes of files that exist; and all have one version of Ray, which is one that carpool takes.
    """
    (manifest,) = parsed("ray/rayservice.yaml")
    serve = pytest.importorskip("yaml").safe_load(manifest["spec"]["serveConfigV2"])
    (application,) = serve["applications"]
    module, _, attribute = application["import_path"].partition(":")
    program = (DEPLOY / "ray" / f"{module}.py").read_text()
    assert re.search(rf"^{attribute} = carpool\.ray\.app\(\"{module}:service\"", program, re.MULTILINE)
    (deployment,) = application["deployments"]
    assert f'name="{deployment["name"]}"' in program

    cluster = manifest["spec"]["rayClusterConfig"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    containers = [each for group in groups for each in group["template"]["spec"]["containers"]]
    (machines,) = parsed("ray/cluster.yaml")
    image = (DEPLOY / "ray" / "Dockerfile").read_text()
    assert {each["image"] for each in containers} == {machines["docker"]["image"]} == {"carpool-ray:latest"}
    assert "-t carpool-ray ." in image
    assert set(re.findall(r"2\.\d+\.\d+", image)) == {cluster["rayVersion"]}
    (least,) = re.findall(r"ray>=2\.(\d+)", (ROOT / "pyproject.toml").read_text())
    assert int(cluster["rayVersion"].split(".")[1]) >= int(least)
    for line in image.splitlines():
        if line.startswith("COPY "):
            assert all((ROOT / name).exists() for name in line.split()[2:-1]), line


def test_what_runs_on_machines_of_ray_fits() -> None:
    """The head is a type of node that there is, and the command that is said to be run there has flags that exist."""
    (machines,) = parsed("ray/cluster.yaml")
    assert machines["head_node_type"] in machines["available_node_types"]
    text = (DEPLOY / "ray" / "cluster.yaml").read_text()
    flags = {f"--{name.replace('_', '-')}" for name in NAMES}
    (command,) = re.findall(r"carpool serve program:service (.*)'", text)
    assert set(re.findall(r"--[a-z-]+", command)) <= flags
    assert (DEPLOY / "ray" / "program.py").exists()


def test_the_job_takes_the_service_of_the_program() -> None:
    """The job imports from the program beside it, and scores the column that it reads."""
    job = (DEPLOY / "ray" / "job.py").read_text()
    assert "from program import service" in job
    assert "carpool.ray.map_batches(images, service, column=" in job


def test_nginx_passes_on_what_is_for_clients_only() -> None:
    """A proxy speaks for all of its clients, and orders are taken from its machine: it passes on none, and none of the
    pages for those who run the server.
    """
    (kept,) = re.findall(r"location ~ (\S+) \{ return 404; \}", (DEPLOY / "nginx.conf").read_text())
    for path in ("/admin/reload", "/admin/services/add", "/metrics", "/dashboard/data"):
        assert re.match(kept, path), path
    assert not re.match(kept, "/models/admin/predict")


def test_nginx_of_debian_12_loads_the_file() -> None:
    """The file has no directive that is newer than nginx 1.22."""
    directives = re.findall(r"^ *(\w+ [^;\n]*);", (DEPLOY / "nginx.conf").read_text(), re.MULTILINE)
    assert "listen 443 ssl http2" in directives
    assert not any(directive.startswith("http2 ") for directive in directives)


def test_the_alerts_load() -> None:
    """Each alert has an expression, a severity and a summary."""
    (file,) = parsed("alerts.yaml")
    for rule in file["groups"][0]["rules"]:
        assert rule["expr"]
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert rule["annotations"]["summary"]


def test_the_image_runs_as_nobody_and_gets_signals() -> None:
    """The image has a numeric user that is not root, no shell in front of carpool, and all that it copies is there."""
    lines = (DEPLOY / "Dockerfile").read_text().splitlines()
    said = {line.split()[0]: line.partition(" ")[2] for line in lines if line and line[0].isupper()}
    assert int(said["USER"].split(":")[0]) > 0
    assert json.loads(said["ENTRYPOINT"]) == ["carpool", "serve"]
    assert "--api-keys" in json.loads(said["CMD"])
    assert "--open-readyz" in json.loads(said["CMD"])  # what follows has no key
    assert said["HEALTHCHECK"].endswith('CMD ["carpool", "health"]')
    for line in lines:
        if line.startswith("COPY ") and "--from" not in line:
            assert all((ROOT / name).exists() for name in line.split()[1:-1]), line


@pytest.mark.slow
def test_systemd_takes_the_unit() -> None:
    """systemd finds nothing to complain of in the units, but for the program that is not installed here."""
    import shutil

    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    done = subprocess.run(
        ["systemd-analyze", "verify", *[str(DEPLOY / name) for name in ("carpool.service", "carpool.socket")]],
        capture_output=True,
        text=True,
        timeout=60,
    )
    complaints = [line for line in done.stderr.splitlines() if "carpool." in line and "not executable" not in line]
    assert complaints == []
