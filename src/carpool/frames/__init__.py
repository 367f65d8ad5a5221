"""Models of tables, which get the rows of many requests as one data frame.

The rows come as CSV, JSON, msgpack or Arrow, and each request gets the answers of its own rows.
"""

from __future__ import annotations

from carpool.frames.libraries import PandasLibrary, PolarsLibrary
from carpool.frames.table import TableModel

__all__ = ["Pandas", "Polars"]


class Pandas(TableModel, library=PandasLibrary()):
    """The base class of models that get all rows of a batch as one pandas frame.

    `predict(self, frame)` returns one answer for each row, as a series, an array, a list or a
    frame. See "Tables" in the docs.
    """


class Polars(TableModel, library=PolarsLibrary()):
    """The base class of models that get all rows of a batch as one polars frame, see `Pandas`."""
