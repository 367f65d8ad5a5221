"""Offline scoring: the models of a service over datasets of Ray Data."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

import carpool
from carpool import Service, Stage
from tests.on_ray.models import Diary, Doubled, Later, Padded, Words
from tests.support.processes import alive
from tests.support.sources import ROOT
from tests.support.waiting import wait_until

pytestmark = [
    pytest.mark.usefixtures("cluster"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # Ray Data warns of settings that it makes itself
]


@pytest.fixture(scope="module")
def data() -> Any:
    """Ray Data, without bars of its progress."""
    ray_data = pytest.importorskip("ray.data")
    ray_data.DataContext.get_current().enable_progress_bars = False
    return ray_data


def test_answers_are_a_column(data: Any) -> None:
    """Each row gets the model's answer to its item, in a column beside those that it has."""
    dataset = data.from_items([{"id": i, "x": float(i)} for i in range(500)], override_num_blocks=4)
    scored = carpool.ray.map_batches(dataset, Stage(Doubled, max_batch_size=16, workers=2), column="x", rows=64)
    rows = scored.take_all()
    assert sorted((row["id"], row["x"], row["answer"]) for row in rows) == [(i, float(i), 2.0 * i) for i in range(500)]


def test_whole_rows_and_stages_in_a_row(data: Any) -> None:
    """Without `column` an item is a whole row; each stage of a service gets the answers of the one before."""
    service = Service(Stage(Words, max_batch_size=8), Stage(Doubled, max_batch_size=8, workers=(1, 2)))
    dataset = data.from_items([{"id": i, "text": "word " * i} for i in range(100)])
    scored = carpool.ray.map_batches(dataset, service, output="twice", stages={"Words": {"num_cpus": 0.5}})
    assert sorted((row["id"], row["twice"]) for row in scored.take_all()) == [(i, 2 * i) for i in range(100)]


def test_a_row_that_fails(data: Any) -> None:
    """With `errors` a row that fails tells why in that column, and the others have their answers."""
    service = Service(Stage(Words, max_batch_size=8), Stage(Doubled, max_batch_size=8))
    dataset = data.from_items([{"text": "a b", "id": 0}, {"text": "bad", "id": 1}, {"text": "", "id": 2}])
    rows = carpool.ray.map_batches(dataset, service, errors="why").take_all()
    by_id = {row["id"]: row for row in rows}
    assert by_id[0]["answer"] == 4 and by_id[2]["answer"] == 0
    assert by_id[0]["why"] == by_id[2]["why"] == ""
    assert by_id[1]["answer"] is None or by_id[1]["answer"] != by_id[1]["answer"]
    assert "ValueError: there is a bad word" in by_id[1]["why"]

    with pytest.raises(Exception, match="there is a bad word"):
        carpool.ray.map_batches(dataset, service).take_all()


def test_batches_are_composed_by_length(data: Any) -> None:
    """A stage with `length=` composes its batches as it does online: rows of about one length share a call."""
    lengths = [1, 100] * 256
    dataset = data.from_items([{"text": "x" * n} for n in lengths], override_num_blocks=1)
    shares = {}
    for name, length in (("composed", len), ("plain", None)):
        stage = Stage(Padded, max_batch_size=16, length=length)
        rows = carpool.ray.map_batches(dataset, stage, column="text", rows=512).take_all()
        assert [row["answer"]["length"] for row in rows] == lengths
        shares[name] = sum(row["answer"]["padded"] - row["answer"]["length"] for row in rows) / sum(lengths)
    assert shares["plain"] > 0.9
    assert shares["composed"] < 0.5 * shares["plain"]


def test_an_async_model(data: Any) -> None:
    """A stage on the loop scores a dataset, too; and a row's own dict goes to it where no column is named."""
    rows = carpool.ray.map_batches(data.range(50), Stage(Later, max_batch_size=4, run_in="loop")).take_all()
    assert sorted((row["id"], row["answer"]) for row in rows) == [(i, i + 1) for i in range(50)]


def test_actors_end_with_the_dataset(data: Any, tmp_path: Path) -> None:
    """Once all rows are scored, models are torn down, and the processes of their actors end."""
    stage = Stage(Diary, kwargs={"folder": str(tmp_path)}, max_batch_size=4)
    rows = carpool.ray.map_batches(data.range(40), stage).take_all()
    assert sorted(row["answer"] for row in rows) == list(range(40))
    files = list(tmp_path.iterdir())
    assert files
    wait_until(lambda: all_ended(files), 60)
    assert [file.read_text() for file in files] == ["torn down"]


PROGRAM = """
    import sys
    import ray
    import carpool
    from tests.on_ray.models import Diary

    stage = carpool.Stage(Diary, kwargs={"folder": sys.argv[1]}, max_batch_size=4)
    carpool.ray.map_batches(ray.data.range(40).map(lambda row: {"id": row["id"] - 1}), stage).take_all()
"""


def test_actors_end_with_a_program_that_fails(data: Any, tmp_path: Path) -> None:
    """The processes of a dataset's actors end with the program, also after an error."""
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM), str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert "there is no such row" in done.stderr
    files = list(tmp_path.iterdir())
    assert files
    wait_until(lambda: all_ended(files), 30)


def all_ended(files: list[Path]) -> bool:
    """Whether the processes have ended that have written diaries."""
    return not any(alive(int(file.name)) for file in files)


@pytest.mark.parametrize(("workers", "sizes"), [(1, (1, 1)), (3, (1, 3)), ((2, 4), (2, 4))])
def test_sizes_of_pools(workers: Any, sizes: tuple[int, int]) -> None:
    """A pool has up to as many actors as the stage has workers, and begins with one unless a pair says more."""
    from carpool.ray.data import settings_of

    pool = settings_of(Stage(Doubled, max_batch_size=4, workers=workers), {})["compute"]
    assert (pool.min_size, pool.max_size) == sizes


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"stages": {"Double": {"workers": 2}}}, "stages names Double, and Doubled has Doubled"),
        ({"stages": {"Doubled": {"gpus": 2}}}, "has no 'gpus'"),
        ({"rows": 0}, "rows must be a whole number of at least 1"),
    ],
)
def test_wrong_settings(data: Any, settings: dict[str, Any], text: str) -> None:
    """What cannot be is refused at once, with the next step."""
    with pytest.raises(ValueError, match=text):
        carpool.ray.map_batches(data.range(3), Stage(Doubled, max_batch_size=4), **settings)
    each = Stage(Doubled, max_batch_size=4, workers=2, env=[{"A": "1"}, {"A": "2"}])
    with pytest.raises(ValueError, match="the actors of a dataset are alike"):
        carpool.ray.map_batches(data.range(3), each)


def test_a_column_that_is_not_there(data: Any) -> None:
    """A dataset without the column fails with the names of those that it has."""
    with pytest.raises(Exception, match="there is no column 'x' in the dataset: it has id"):
        carpool.ray.map_batches(data.range(3), Stage(Doubled, max_batch_size=4), column="x").take_all()
