"""An extension of Griffe: the reference shows the settings of a declaration as callers give them.

`max_rows: int | None = setting(None, optional_count)` is shown as `max_rows: int | None = None`,
and of `Setting[given, kept]` only the type that is given.
"""

from __future__ import annotations

from typing import Any

from griffe import Attribute, Expr, ExprCall, ExprSubscript, ExprTuple, Extension


class SettingsAsGiven(Extension):  # type: ignore[misc]  # Griffe is in the environment of the site alone
    """Puts defaults and types into the place of what the code has for them."""

    def on_attribute_instance(self, *, attr: Attribute, **_: Any) -> None:
        """Rewrite one attribute of a class."""
        match attr.value:
            case ExprCall(function=function, arguments=[default, *_]) if str(function) == "setting":
                attr.value = default
        attr.annotation = _given(attr.annotation)


def _given(annotation: str | Expr | None) -> str | Expr | None:
    match annotation:
        case ExprSubscript(left=left, slice=ExprTuple(elements=[given, _])) if str(left) == "Setting":
            return given
    return annotation
