"""Models of tables, which get the rows of many requests as one data frame.

The rows come as CSV, JSON, msgpack or Arrow, and each request gets the answers of its own rows.
"""

from __future__ import annotations

from carpool.frames.libraries import PandasLibrary, PolarsLibrary
from carpool.frames.table import TableModel

__all__ = ["Pandas", "Polars"]


class Pandas(TableModel, library=PandasLibrary()):
    """A model whose `predict(self, frame)` gets all rows of a batch as one pandas frame.

    `predict` returns one answer for each row, as a series, an array, a list or a frame. See
    docs/tables.md.
    """


class Polars(TableModel, library=PolarsLibrary()):
    """A model like `Pandas`, whose `predict(self, frame)` gets a polars frame."""
