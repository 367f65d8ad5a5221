"""The model of document 5's experiment, as a service for each of two ways to read its requests."""

from __future__ import annotations

import io

import numpy as np
import pandas

import carpool

FIELDS = 10


class Rows(carpool.Model):
    """Answers a CSV body of one row with its sum; one `read_csv` parses all of a batch."""

    accepts = ("text/csv",)
    produces = "text/csv"

    def decode(self, bodies: list[bytes]) -> list[list[float]]:
        frame = pandas.read_csv(io.BytesIO(b"\n".join(bodies)), header=None)
        return self.checked(frame, len(bodies))

    def predict(self, rows: list[list[float]]) -> list[float]:
        sums: list[float] = np.asarray(rows).sum(axis=1).tolist()
        return sums

    def encode(self, results: list[float]) -> list[bytes]:
        return [b"%.3f\n" % result for result in results]

    def checked(self, frame: pandas.DataFrame, rows: int) -> list[list[float]]:
        if frame.shape != (rows, FIELDS):
            raise ValueError(f"each body must be one row of {FIELDS} numbers")
        found: list[list[float]] = frame.to_numpy(np.float64).tolist()
        return found


class RowsOneByOne(Rows):
    """The same, with a `read_csv` for each request."""

    def decode(self, bodies: list[bytes]) -> list[list[float]]:
        return [self.checked(pandas.read_csv(io.BytesIO(body), header=None), 1)[0] for body in bodies]


one_parse = carpool.Service(carpool.Stage(Rows, max_batch_size=100), name="rows")
a_parse_each = carpool.Service(carpool.Stage(RowsOneByOne, max_batch_size=100), name="rows")
