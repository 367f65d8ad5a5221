"""The files of deploy/ray: Ray takes them, and what they run works."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.sources import ROOT

FOLDER = ROOT / "deploy" / "ray"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Ray's own, as its schema is imported
def test_ray_takes_the_description_of_the_machines() -> None:
    """`cluster.yaml` is as the schema of `ray up` wants it, and the manifest's applications are as Serve wants them."""
    ray = pytest.importorskip("ray")
    jsonschema, yaml = pytest.importorskip("jsonschema"), pytest.importorskip("yaml")
    pytest.importorskip("ray.serve")
    from ray.serve.schema import ServeDeploySchema

    schema = json.loads((Path(ray.__file__).parent / "autoscaler" / "ray-schema.json").read_text())
    jsonschema.validate(yaml.safe_load((FOLDER / "cluster.yaml").read_text()), schema)
    manifest = yaml.safe_load((FOLDER / "rayservice.yaml").read_text())
    config = ServeDeploySchema.model_validate(yaml.safe_load(manifest["spec"]["serveConfigV2"]))
    assert [each.import_path for each in config.applications] == ["program:app"]


@pytest.mark.timeout(240)
def test_the_job(cluster: Any, tmp_path: Path) -> None:
    """The job gives each image of a file its digit, and tells of the row that is no image."""
    arrow = pytest.importorskip("pyarrow")
    pytest.importorskip("ray.serve")  # the program is that of the manifest, too
    from pyarrow import parquet
    from sklearn.datasets import load_digits

    images, digits = load_digits(return_X_y=True)
    rows = [{"id": i, "image": image.tolist()} for i, image in enumerate(images[900:1100])]
    rows.append({"id": len(rows), "image": [1.0]})
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "images.parquet")
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), str(FOLDER)])
    command = [sys.executable, str(FOLDER / "job.py"), str(tmp_path / "images.parquet"), str(tmp_path / "digits")]
    env = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, cwd=FOLDER, env=env, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    scored = {row["id"]: row for row in parquet.read_table(tmp_path / "digits").to_pylist()}
    right = sum(scored[i]["digit"] == digits[900 + i] and not scored[i]["error"] for i in range(200))
    assert right > 180
    assert scored[200]["error"]
