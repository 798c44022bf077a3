# SPDX-License-Identifier: Apache-2.0
"""What a layer's docstring says of its Variables is what it has, and what a call writes.

The section's grammar: ``names: Kind, dtype[shape]; remarks.`` A remark with "written" says that a
call writes the Variable; "written when training", that it doesn't in evaluation.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest

import tether
from tether import nn

laws = pytest.importorskip("tests.laws.layers", reason="the table of layers is not written yet", exc_type=ImportError)
KINDS = {"Param", "State", "Rng", "Constant"}
SECTION = re.compile(r"^Variables:\n((?:[ ]+.*\n?|\n)*)", re.MULTILINE)


@dataclass(frozen=True)
class Entry:
    """What the docstring says of one Variable."""

    kind: str
    written: bool
    training_only: bool


def entries(cls: type) -> dict[str, Entry] | None:
    """Reads the Variables section of a class, name -> Entry; None where there is none."""
    section = SECTION.search(inspect.cleandoc(vars(cls).get("__doc__") or "") + "\n")
    if section is None:
        return None
    found = {}
    text = inspect.cleandoc(section[1])
    for line in re.sub(r"\n +", " ", text).splitlines():
        names, _, rest = line.partition(":")
        kind = re.match(r"\s*(\w+)", rest)
        assert kind and kind[1] in KINDS, f"{cls.__name__}: {line!r} does not name one of {sorted(KINDS)}"
        written = re.search(r"\bwritten\b", rest) is not None
        entry = Entry(kind[1], written, "when training" in rest)
        found |= {name.strip(): entry for name in names.split(",")}
    return found


def own_variables(module: tether.Module) -> dict[str, list[Any]]:
    """The Variables that are attributes of the module itself, by attribute; a pytree makes several."""
    below = tuple(path + end for path in tether.modules(module) if path for end in (".", "["))
    own: dict[str, list[Any]] = {}
    for path, variable in tether.variables(module).items():
        if not path.startswith(below):
            own.setdefault(re.split(r"[.\[]", path)[0], []).append(variable)
    return own


def layer_classes() -> list[type]:
    named = (getattr(nn, name) for name in nn.__all__)
    return [value for value in named if inspect.isclass(value) and issubclass(value, tether.Module)]


@cache
def rows_by_class() -> dict[type, list[Any]]:
    found: dict[type, list[Any]] = {}
    for row in laws.LAYERS:
        for cls in type(row.make()).__mro__:  # a layer of several inputs stands there as a subclass that takes one
            found.setdefault(cls, []).append(row)
    return found


def rows(cls: type) -> list[Any]:
    return rows_by_class().get(cls, [])


def written_by(module: tether.Module, row: Any, training: bool) -> set[str]:
    """Names of the module's own Variables that one call writes."""
    given = row.input()
    args = given if isinstance(given, tuple) else (given,)
    writes = tether.uses(lambda *args: module(*args, training=training))(*args).writes.values()
    return {
        name
        for name, cells in own_variables(module).items()
        if any(cell is write for cell in cells for write in writes)
    }


@pytest.mark.parametrize("cls", layer_classes(), ids=lambda cls: cls.__name__)
class TestLayer:
    def test_has_a_row_in_the_law_table(self, cls: type):
        assert rows(cls), f"tests/laws/layers.py has no row for {cls.__name__}"

    def test_section_names_the_variables(self, cls: type):
        said, have = entries(cls) or {}, {}
        for row in rows(cls):
            for name, cells in own_variables(row.make()).items():
                have.setdefault(name, set()).update(type(cell).__name__ for cell in cells)
        assert {name: {entry.kind} for name, entry in said.items()} == have

    @pytest.mark.parametrize("training", [True, False])
    def test_section_says_what_is_written(self, cls: type, training: bool):
        said = {name for name, entry in (entries(cls) or {}).items() if entry.written}
        if not training:
            said = {name for name in said if not entries(cls)[name].training_only}
        assert said == {name for row in rows(cls) for name in written_by(row.make(), row, training)}


def test_section_is_read():
    class Norm:
        """Says what.

        Args:
            size: Number of channels.
        Variables:
            scale, bias: Param, float[size].
            mean: State, float[size]; written
                when training.
            calls: State, int[]; written.
        Shapes:
            x: float[size] -> float[size]
        """

    param, calls = Entry("Param", False, False), Entry("State", True, False)
    expected = {"scale": param, "bias": param, "mean": Entry("State", True, True), "calls": calls}
    assert entries(Norm) == expected
    assert entries(object) is None
