"""Small tables for people: as text at a prompt, as HTML in a notebook."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

Row = Sequence[str]


def as_text(rows: Sequence[Row]) -> str:
    """Return rows, the first of which are the headings, as aligned columns: the first one to the
    left, the others to the right.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join([row[0].ljust(widths[0]), *cells]).rstrip())
    return "\n".join(lines)


def as_html(title: str, rows: Sequence[Row], notes: Sequence[str] = ()) -> str:
    """Return a table with its title above it and notes below it; the first row has the headings."""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in rows[0])
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows[1:])
    below = "".join(f"<div>{escape(note)}</div>" for note in notes)
    return f"<div><b>{escape(title)}</b></div><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{below}"


def counted(n: int, one: str, several: str = "") -> str:
    """Return a number with the word for what is counted; that for several is by default that for
    one, with an s.
    """
    return f"{n:,} {one if n == 1 else several or f'{one}s'}"


def milliseconds(seconds: float) -> str:
    """Return a duration in milliseconds, without the unit, to three digits or so."""
    ms = seconds * 1e3
    return f"{ms:.2f}" if ms < 10 else f"{ms:.1f}" if ms < 100 else f"{ms:,.0f}"
