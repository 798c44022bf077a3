# SPDX-License-Identifier: Apache-2.0
"""A table of text, printed in a terminal by rich and in a notebook as HTML: for ``summary`` and ``diff``."""

from __future__ import annotations

import html
import io
from collections.abc import Sequence
from typing import NamedTuple

import rich.box
import rich.console
import rich.table
import rich.text

__all__ = ["Column", "Table", "binary", "count"]


class Column(NamedTuple):
    """A head, and whether what stands below it are numbers, aligned to the right."""

    name: str
    numeric: bool = False


class Table(NamedTuple):
    """Rows of text; a line break in a cell is one in the table.

    Attributes:
        title: What it shows, in a line.
        columns: Heads.
        rows: One text per column.
        total: A last row, set apart; empty for none.
    """

    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[str]]
    total: Sequence[str] = ()

    def rich(self) -> rich.table.Table:
        """The table as rich prints it."""
        title = rich.text.Text(self.title)
        table = rich.table.Table(
            title=title, title_justify="left", box=rich.box.SIMPLE_HEAD, show_footer=bool(self.total)
        )
        # Text, not str: rich reads the brackets of a path such as "[0].weight" in a str as its markup.
        for column, last in zip(self.columns, self.total or [""] * len(self.columns), strict=True):
            justify = "right" if column.numeric else "left"
            table.add_column(rich.text.Text(column.name), rich.text.Text(last), justify=justify, no_wrap=True)
        for row in self.rows:
            table.add_row(*map(rich.text.Text, row))
        return table

    def text(self) -> str:
        """The table as plain text, as wide as it needs to be."""
        file = io.StringIO()
        rich.console.Console(file=file, width=10_000, color_system=None).print(self.rich())
        return "\n".join(line.rstrip() for line in file.getvalue().rstrip().splitlines())

    def html(self) -> str:
        """The table as an HTML table; everything in it is escaped."""
        parts = [f"<caption>{_escaped(self.title)}</caption>", f"<thead>{self._row(_names(self), 'th')}</thead>"]
        parts.append(f"<tbody>{''.join(self._row(row, 'td') for row in self.rows)}</tbody>")
        if self.total:
            parts.append(f"<tfoot>{self._row(self.total, 'th')}</tfoot>")
        return f"<table>{''.join(parts)}</table>"

    def _row(self, row: Sequence[str], tag: str) -> str:
        align = ["right" if column.numeric else "left" for column in self.columns]
        cells = (
            f'<{tag} style="text-align: {side}">{_escaped(text)}</{tag}>' for text, side in zip(row, align, strict=True)
        )
        return f"<tr>{''.join(cells)}</tr>"


def _names(table: Table) -> list[str]:
    return [column.name for column in table.columns]


def _escaped(text: str) -> str:
    return html.escape(text).replace("\n", "<br/>")


def count(number: int) -> str:
    """A count with its thousands set apart; nothing for 0."""
    return f"{number:,}" if number else ""


def binary(size: int) -> str:
    """A number of bytes in the unit that suits it: ``1.5 KiB``."""
    value, units = float(size), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{size} B" if units[0] == "B" else f"{value:.1f} {units[0]}"
