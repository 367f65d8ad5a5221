"""Models of tables, for workers that need pandas and nothing else."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pandas as pd

from carpool.frames import Pandas


class Sum(Pandas):
    """a + b, and whether the plan has a second word; declared columns."""

    columns: ClassVar[dict[str, Any]] = {"a": "float64", "b": "int64", "plan": "str"}
    examples = ([{"a": 1.0, "b": 2, "plan": "basic"}],)

    def setup(self) -> None:
        self.calls: list[int] = []

    def predict(self, frame: pd.DataFrame) -> pd.DataFrame:
        self.calls.append(len(frame))
        assert list(frame.index) == list(range(len(frame)))
        if (frame["a"] == 666).any():
            frame["a"] *= 1000  # must not be seen when it is called again
            raise RuntimeError("not this one")
        return pd.DataFrame({"sum": frame["a"] + frame["b"], "plan": frame["plan"]})


class Inferred(Pandas):
    """No columns: what comes is read by itself."""

    def predict(self, frame: pd.DataFrame) -> list[str]:
        return [str(frame.dtypes.iloc[0])] * len(frame)


class InOneMemory(Pandas):
    """Answers with the first column, in the same memory again and again."""

    def setup(self) -> None:
        self.out = np.zeros(100)

    def predict(self, frame: pd.DataFrame) -> Any:
        self.out[: len(frame)] = frame.iloc[:, 0]
        return self.out[: len(frame)]
