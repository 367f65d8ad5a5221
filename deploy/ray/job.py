"""Offline scoring as a job: each image of a Parquet file gets its digit, by the service's model.

ray job submit --address http://HEAD:8265 --working-dir . -- python job.py images.parquet digits
"""

import sys

import ray
from program import service

import carpool


def main() -> None:
    source, out = sys.argv[1:]
    images = ray.data.read_parquet(source)
    scored = carpool.ray.map_batches(images, service, column="image", output="digit", errors="error")
    scored.select_columns(["id", "digit", "error"]).write_parquet(out)


if __name__ == "__main__":
    main()
