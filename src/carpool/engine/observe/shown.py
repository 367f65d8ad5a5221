"""Small tables for people: as text at a prompt, as HTML in a notebook."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

Row = Sequence[str]


def as_text(rows: Sequence[Row]) -> str:
    """Return rows as aligned columns; the first column is aligned to the left, the others to the
    right.

    Args:
        rows: The headings and the rows below them, all of one length.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join([row[0].ljust(widths[0]), *cells]).rstrip())
    return "\n".join(lines)


def as_html(title: str, rows: Sequence[Row], notes: Sequence[str] = ()) -> str:
    """Return a table with its title above it and notes below it.

    Args:
        title: What the table is about.
        rows: The headings and the rows below them, all of one length.
        notes: Lines below the table.
    """
    head = "".join(f"<th>{escape(cell)}</th>" for cell in rows[0])
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows[1:])
    below = "".join(f"<div>{escape(note)}</div>" for note in notes)
    return f"<div><b>{escape(title)}</b></div><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{below}"


def counted(n: int, one: str, several: str = "") -> str:
    """Return a number with what is counted.

    Args:
        n: The number.
        one: The words for one of it.
        several: The words for several; by default those for one, with an s.
    """
    return f"{n:,} {one if n == 1 else several or f'{one}s'}"


def milliseconds(seconds: float) -> str:
    """Return a duration in milliseconds, without the unit, to three digits or so."""
    ms = seconds * 1e3
    return f"{ms:.2f}" if ms < 10 else f"{ms:.1f}" if ms < 100 else f"{ms:,.0f}"
