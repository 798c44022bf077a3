# SPDX-License-Identifier: Apache-2.0
"""``summary``: rows, sums, and what is printed."""

from __future__ import annotations

import io
import xml.etree.ElementTree as ElementTree

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rich.console

import tether
from tether import Param, State, summary
from tether.errors import ArgumentError, SelectionError


class Linear(tether.Module):
    def __init__(self, n_in, n_out):
        self.weight = Param(jnp.ones((n_out, n_in)))
        self.bias = Param(jnp.zeros(n_out))


class Norm(tether.Module):
    def __init__(self, size):
        self.scale = Param(jnp.ones(size, jnp.bfloat16))
        self.mean = State(jnp.zeros(size))
        self.count = State(jnp.zeros((), jnp.int32))
        self.rng = tether.Rng(0)
        self.table = tether.Constant(np.zeros(5, np.uint8))


class Relu(tether.Module):
    def __call__(self, x):
        return jax.nn.relu(x)


class Block(tether.Module):
    def __init__(self):
        self.linear = Linear(2, 3)
        self.norm = Norm(3)


class Chain(tether.Module):
    _transparent_ = ("layers",)

    def __init__(self, *layers):
        self.layers = layers


class Net(tether.Module):
    def __init__(self):
        self.body = Chain(Block(), Relu(), Linear(3, 2))
        self.head = Linear(3, 2)
        self.head.weight = tether.cell(self.body.layers[2], "weight")
        self.temperature = Param(jnp.ones(()))


BLOCK_BYTES = (6 + 3) * 4 + 3 * 2 + 3 * 4 + 4 + 8 + 5


def sums(rows):
    return [(row.path, row.cls, row.trainable, row.frozen, row.state) for row in rows]


def test_rows():
    report = summary(Net())
    assert sums(report.rows) == [
        ("", "Net", 1, 0, 0),
        ("body", "Chain", 0, 0, 0),
        ("body[0]", "Block", 0, 0, 0),
        ("body[0].linear", "Linear", 9, 0, 0),
        ("body[0].norm", "Norm", 3, 0, 10),
        ("body[1]", "Relu", 0, 0, 0),
        ("body[2]", "Linear", 8, 0, 0),
        ("head", "Linear", 2, 0, 0),
    ]
    rows = {row.path: row for row in report.rows}
    assert rows["body[0].norm"].cells == (
        "scale  bfloat16[3]",
        "mean  float32[3]",
        "count  int32[]",
        "rng  key<fry>[]",
        "table  uint8[5]",
    )
    assert rows["body[0].norm"].bytes == BLOCK_BYTES - 36
    assert rows["head"].cells == ("weight  float32[2, 3]  (tied to body[2].weight)", "bias  float32[2]")


def test_sums():
    model, report = Net(), summary(Net())
    assert (report.trainable, report.frozen, report.state, report.parameters) == (23, 0, 10, 23)
    params = jax.tree.leaves(tether.filter(model, Param))
    assert report.parameters == sum(leaf.size for leaf in params)
    assert report.bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(model)) == BLOCK_BYTES + 4 * (1 + 8 + 2)


@pytest.mark.parametrize(
    ("depth", "paths"),
    [
        (0, [""]),
        (1, ["", "body", "head"]),
        (2, ["", "body", "body[0]", "body[1]", "body[2]", "head"]),
        (9, ["", "body", "body[0]", "body[0].linear", "body[0].norm", "body[1]", "body[2]", "head"]),
    ],
)
def test_depth(depth, paths):
    report, whole = summary(Net(), depth=depth), summary(Net())
    assert [row.path for row in report.rows] == paths
    assert (report.trainable, report.state, report.bytes) == (whole.trainable, whole.state, whole.bytes)


def test_what_lies_below_a_row():
    body = summary(Net(), depth=1).rows[1]
    assert (body.trainable, body.state, body.below, body.cells) == (20, 10, 9, ())
    assert "9 in modules below" in str(summary(Net(), depth=1))
    assert all(row.below == 0 for row in summary(Net()).rows)


def test_select():
    report = summary(Net(), select=State)
    assert sums(report.rows) == [("body[0].norm", "Norm", 0, 0, 4)]
    assert summary(Net(), select="head").bytes == 32  # its own bias, and the weight that it shares
    assert [row.path for row in summary(Net(), select=Linear).rows] == ["body[0].linear", "body[2]", "head"]
    assert summary(Net(), select=Relu).rows == ()
    with pytest.raises(SelectionError, match="names nothing"):
        summary(Net(), select="tail")


def test_frozen():
    report = summary(tether.freeze(Net(), "body"))
    assert (report.trainable, report.frozen, report.parameters) == (3, 20, 23)
    assert summary(tether.freeze(Net(), "body"), select=Param).parameters == 3


def test_stands_for_arrays():
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), Net())
    assert str(summary(shapes)) == str(summary(Net()))
    empty = summary(tether.filter(Net(), State))
    assert (empty.parameters, empty.state) == (0, 4)
    assert "weight  None" in str(empty)


def test_inside_a_transformation():
    seen = []
    jax.make_jaxpr(lambda model: seen.append(str(summary(model))))(Net())
    assert seen == [str(summary(Net()))]


class Siamese(tether.Module):
    def __init__(self):
        self.deep = Chain(Block())
        self.left = self.deep.layers[0]
        self.right = Chain(self.left.linear, Relu())


def test_shared_module_is_counted_once():
    report = summary(Siamese())
    assert [(row.path, row.same_as, row.parameters) for row in report.rows] == [
        ("", "", 0),
        ("deep", "", 0),
        ("deep[0]", "", 0),
        ("deep[0].linear", "", 9),
        ("deep[0].norm", "", 3),
        ("left", "deep[0]", 0),
        ("right", "", 0),
        ("right[0]", "deep[0].linear", 0),
        ("right[1]", "", 0),
    ]
    assert (report.parameters, report.bytes) == (12, BLOCK_BYTES)
    assert "the same as deep[0].linear" in str(report)


def test_shared_module_and_depth_and_select():
    report = summary(Siamese(), depth=1)
    assert [(row.path, row.same_as, row.parameters) for row in report.rows] == [
        ("", "", 0),
        ("deep", "", 12),
        ("left", "deep[0]", 0),
        ("right", "", 0),
    ]
    assert [row.path for row in summary(Siamese(), select=State).rows] == ["deep[0].norm"]
    assert [row.path for row in summary(Siamese(), select=Linear).rows] == ["deep[0].linear", "right[0]"]


def test_text():
    lines = str(summary(Net())).splitlines()
    assert lines[0] == "Net: 23 parameters, 115 B"
    assert lines[2].split() == ["path", "class", "cells", "trainable", "frozen", "state", "bytes"]
    assert lines[4].split() == ["(itself)", "Net", "temperature", "float32[]", "1", "4", "B"]
    assert lines[-1].split() == ["total", "23", "10", "115", "B"]
    assert repr(summary(Net())) == str(summary(Net()))


def test_html():
    table = ElementTree.fromstring(summary(Net())._repr_html_())
    assert len(table.find("tbody")) == 8
    assert [cell.text for cell in table.find("tfoot").iter("th")][3] == "23"
    assert table.find("caption").text == "Net: 23 parameters, 115 B"


def test_rich():
    console = rich.console.Console(width=120, record=True, file=io.StringIO())
    console.print(summary(Net()))
    assert "body[0].linear" in console.export_text()


def test_class_name_is_escaped():
    named = type("<Odd>", (Relu,), {})()
    assert "&lt;Odd&gt;" in summary(named)._repr_html_() and "<Odd>" in str(summary(named))


@pytest.mark.parametrize("depth", [-1, 1.0, True, "1"])
def test_bad_depth(depth):
    with pytest.raises(ArgumentError, match="summary: depth is no level of modules"):
        summary(Net(), depth=depth)


@pytest.mark.parametrize("module", [[Relu()], jnp.ones(2), Relu, None])
def test_no_module(module):
    with pytest.raises(ArgumentError, match="summary: this is no module") as error:
        summary(module)
    assert error.value.fixes
