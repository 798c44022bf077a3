# SPDX-License-Identifier: Apache-2.0
"""Tables as text and as HTML."""

from __future__ import annotations

import io
import xml.etree.ElementTree as ElementTree

import pytest
import rich.console

from tether.tree._table import Column, Table, binary, count

TABLE = Table(
    "Two <rows>",
    [Column("path"), Column("bytes", numeric=True)],
    [["[0].weight", "12"], ["[/bold]", "1\n2,000"]],
    ["total", "2,012"],
)


def test_text():
    lines = TABLE.text().splitlines()
    assert lines[0] == "Two <rows>"
    assert [line.split() for line in lines if line.strip("─ ")] == [
        ["Two", "<rows>"],
        ["path", "bytes"],
        ["[0].weight", "12"],
        ["[/bold]", "1"],
        ["2,000"],
        ["total", "2,012"],
    ]
    ends = {len(line) for line in lines[1:] if line.strip("─ ")}
    assert len(ends) == 1  # numbers stand to the right
    assert not any(line.endswith(" ") for line in lines)


def test_text_is_as_wide_as_it_needs_to_be():
    assert "x" * 300 in Table("", [Column("path")], [["x" * 300]]).text()


def test_html_is_a_table():
    table = ElementTree.fromstring(TABLE.html())
    assert table.tag == "table" and table.find("caption").text == "Two <rows>"
    assert [cell.text for cell in table.find("thead").iter("th")] == ["path", "bytes"]
    assert [cell.text for cell in table.find("tfoot").iter("th")] == ["total", "2,012"]
    assert [cell.text for cell in table.find("tbody").iter("td")] == ["[0].weight", "12", "[/bold]", "1"]


def test_html_is_escaped():
    page = Table("<script>", [Column("<b>")], [["<i>&\"'"]]).html()
    assert "<script>" not in page and "<b>" not in page and "<i>" not in page
    assert "&lt;i&gt;&amp;&quot;&#x27;" in page


def test_no_total():
    assert "tfoot" not in Table("", [Column("a")], [["1"]]).html()
    assert Table("", [Column("a")], [["1"]]).text().split() == ["a", "─" * 3, "1"]


def test_rich_prints_it():
    console = rich.console.Console(width=60, record=True, file=io.StringIO())
    console.print(TABLE.rich())
    assert "[0].weight" in console.export_text()


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1536, "1.5 KiB"), (5 << 20, "5.0 MiB"), (3 << 50, "3072.0 TiB")],
)
def test_binary(size, text):
    assert binary(size) == text


def test_count():
    assert [count(0), count(12), count(1234567)] == ["", "12", "1,234,567"]
