"""Ready doors for tables: CSV, JSON, msgpack and Arrow bodies of one or many rows become one data frame per batch."""

from __future__ import annotations

from carpool.frames.libraries import PandasLibrary, PolarsLibrary
from carpool.frames.table import TableModel

__all__ = ["Pandas", "Polars"]


class Pandas(TableModel, library=PandasLibrary()):
    """A model whose `predict(self, frame)` gets the rows of all requests of a batch as one pandas frame.

    It returns one answer a row: a series, an array, a list or a frame. See docs/tables.md.
    """


class Polars(TableModel, library=PolarsLibrary()):
    """Likewise with polars."""
