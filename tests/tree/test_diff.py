# SPDX-License-Identifier: Apache-2.0
"""``diff``: what changed, against plain NumPy."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ElementTree

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tether
from tether import Param, State, diff, snapshot
from tether.errors import ArgumentError, SelectionError, StructureError

NAN, INF = math.nan, math.inf


class Cell(tether.Module):
    """A module of one State with this value."""

    def __init__(self, value):
        self.x = State(value)


class Net(tether.Module):
    def __init__(self, size=3):
        self.weight = Param(jnp.arange(float(size)))
        self.mean = State(jnp.zeros(size))
        self.count = State(jnp.zeros((), jnp.int32))
        self.rng = tether.Rng(0)


def change(old, new, dtype=None):
    """The change of a Variable from one array to another; None for none."""
    before, after = (Cell(jnp.zeros(())) for _ in range(2))
    arrays = [np.asarray(x, dtype) if isinstance(x, list | int | float | bool) else x for x in (old, new)]
    before, after = (tether.tree_at(lambda m: m.x, m, x) for m, x in zip((before, after), arrays, strict=True))
    return diff(before, after).get("x")


class TestModule:
    def test_what_changed(self):
        model = Net()
        before = snapshot(model)
        model.weight = model.weight + jnp.array([0.0, 0.5, -1.0])
        model.count = model.count + 3
        report = diff(before, model)
        assert list(report) == ["weight", "count"] and len(report) == 2
        assert report.unchanged == ("mean", "rng")
        weight, count = report["weight"], report["count"]
        assert (weight.kind, weight.shape, weight.dtype, weight.elements, weight.changed) == (
            "Param",
            (3,),
            "float32",
            3,
            2,
        )
        assert weight.max_abs == 1.0 and weight.nan == 0
        assert weight.relative == pytest.approx(math.sqrt(1.25 / 5))
        assert (count.changed, count.max_abs, count.relative) == (1, 3.0, INF)

    def test_nothing_changed(self):
        report = diff(snapshot(Net()), Net())
        assert not report and report.unchanged == ("weight", "mean", "count", "rng")
        assert repr(report) == "0 of 4 Variables changed"

    def test_select(self):
        model = Net()
        before = snapshot(model)
        model.weight, model.mean = model.weight + 1, model.mean + 1
        assert list(diff(before, model, Param)) == ["weight"]
        assert list(diff(before, model, "m*")) == ["mean"]
        assert list(diff(before, model, [State, tether.Rng])) == ["mean"]
        assert diff(before, model, ~Param).unchanged == ("count", "rng")
        cell_before, cell_after = tether.cell(before, "mean"), tether.cell(model, "mean")
        assert list(diff(before, model, cell_after)) == list(diff(before, model, cell_before)) == ["mean"]

    def test_view_may_be_compared(self):
        model = Net()
        before = snapshot(model)
        model.mean = model.mean + 1
        assert list(diff(before, tether.freeze(model))) == ["mean"]
        assert list(diff(before, model.eval())) == ["mean"]

    def test_containers(self):
        before = {"a": Net(), "b": [Net()]}
        after = {"a": Net(), "b": [tether.tree_at(lambda m: m.mean, Net(), jnp.ones(3))]}
        assert list(diff(before, after)) == ["['b'][0].mean"]

    def test_tied_cell_is_one(self):
        class Tied(tether.Module):
            def __init__(self):
                self.one, self.two = Cell(jnp.ones(2)), Cell(jnp.ones(2))
                self.two.x = tether.cell(self.one, "x")

        model = Tied()
        before = snapshot(model)
        model.two.x = model.two.x * 2
        assert list(diff(before, model)) == ["one.x"]

    def test_keys(self):
        model = Net()
        before = snapshot(model)
        tether.cell(model, "rng").value = jax.random.key(7)
        entry = diff(before, model)["rng"]
        assert (entry.kind, entry.dtype, entry.elements, entry.changed) == ("Rng", "key<fry>", 1, 1)
        assert entry.max_abs is None and entry.relative is None

    def test_two_devices(self):
        model = Cell(jnp.ones(2))
        before = snapshot(model)
        moved = jax.device_put(jax.tree.map(lambda x: x + 1, model), jax.devices()[1])
        assert diff(before, moved)["x"].max_abs == 1.0


class TestNumbers:
    @pytest.mark.parametrize(
        ("old", "new", "changed", "max_abs", "relative", "nan"),
        [
            ([3.0, 4.0], [3.0, 4.5], 1, 0.5, 0.1, 0),
            ([0.0, 0.0], [0.0, 2.0], 1, 2.0, INF, 0),
            ([-0.0, 1.0], [0.0, 1.5], 1, 0.5, 0.5, 0),
            ([NAN, 4.0], [NAN, 5.0], 1, 1.0, 0.25, 0),
            ([1.0, 4.0], [NAN, 5.0], 2, 1.0, 0.25, 1),
            ([NAN, 4.0], [1.0, 4.0], 1, 0.0, 0.0, 1),
            ([INF, 1.0], [INF, 2.0], 1, 1.0, 0.0, 0),
            ([1.0, 1.0], [INF, 1.0], 1, INF, INF, 0),
            ([INF, 1.0], [-INF, 1.0], 1, INF, INF, 0),
            ([1e200, 1e200], [1e200, 2e200], 1, 1e200, 1 / math.sqrt(2), 0),
            ([1e-200], [3e-200], 1, 2e-200, 2.0, 0),
        ],
    )
    def test_floats(self, old, new, changed, max_abs, relative, nan):
        entry = change(old, new, np.float64)
        assert (entry.changed, entry.nan) == (changed, nan)
        assert entry.max_abs == pytest.approx(max_abs) and entry.relative == pytest.approx(relative)

    @pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float8_e4m3fn, np.float32])
    def test_small_floats(self, dtype):
        assert change(np.array([1, 2], dtype), np.array([1, 3], dtype)).max_abs == 1.0

    @pytest.mark.parametrize(
        ("old", "new", "dtype", "max_abs"),
        [
            ([1, 2], [5, 2], np.int8, 4),
            ([-128], [127], np.int8, 255),
            ([0], [255], np.uint8, 255),
            ([-(2**63)], [2**63 - 1], np.int64, 2**64 - 1),
            ([0], [2**64 - 1], np.uint64, 2**64 - 1),
            ([2**63], [2**63 + 1], np.uint64, 1),
            ([2**53], [2**53 + 1], np.int64, 1),
            ([1], [3], jnp.int4, 2),
        ],
    )
    def test_integers(self, old, new, dtype, max_abs):
        entry = change(old, new, dtype)
        assert entry.max_abs == float(max_abs)
        assert entry.changed == sum(one != other for one, other in zip(old, new, strict=True))

    def test_bools(self):
        entry = change([True, False, False], [True, True, True])
        assert (entry.changed, entry.max_abs, entry.relative) == (2, 1.0, pytest.approx(math.sqrt(2)))

    def test_complex(self):
        entry = change(np.array([3 + 4j, 1]), np.array([0 + 0j, 1]))
        assert (entry.changed, entry.max_abs) == (1, 5.0)

    def test_scalar_and_empty(self):
        assert change(1.0, 2.0).max_abs == 1.0
        assert change(np.zeros((0, 3)), np.zeros((0, 3))) is None

    def test_batch_of_keys(self):
        keys = jax.random.split(jax.random.key(0), 4)
        other = keys.at[2].set(jax.random.key(5))
        entry = change(keys, other)
        assert (entry.elements, entry.changed) == (4, 1)
        assert change(keys, jax.random.wrap_key_data(jax.random.key_data(keys))) is None

    def test_by_chunks(self, monkeypatch):
        rng = np.random.default_rng(0)
        old = rng.normal(size=(7, 11))
        new = old + rng.normal(size=(7, 11)) * (rng.random((7, 11)) > 0.5)
        whole = change(old, new)
        monkeypatch.setattr("tether.tree._diff._CHUNK", 10)
        parts = change(old, new)
        assert (
            (parts.changed, parts.max_abs)
            == (whole.changed, whole.max_abs)
            == ((old != new).sum(), abs(new - old).max())
        )
        expected = np.linalg.norm(new - old) / np.linalg.norm(old)
        assert parts.relative == pytest.approx(expected) and whole.relative == pytest.approx(expected)

    def test_what_is_no_array(self):
        assert change(None, None) is None
        assert change("spec", "spec") is None
        with pytest.raises(StructureError, match="not of the same kind, shape and dtype"):
            change("spec", "other")


class TestReport:
    def report(self):
        model = Net()
        before = snapshot(model)
        model.weight = model.weight.at[0].set(jnp.nan) + 1
        tether.cell(model, "rng").value = jax.random.key(7)
        return diff(before, model)

    def test_text(self):
        lines = [line.split() for line in repr(self.report()).splitlines()]
        assert lines[0] == ["2", "of", "4", "Variables", "changed"]
        assert lines[2] == ["path", "kind", "array", "changed", "max", "abs", "relative", "NaN"]
        assert lines[4] == ["weight", "Param", "float32[3]", "3", "of", "3", "1", "0.632", "1"]
        assert lines[5] == ["rng", "Rng", "key<fry>[]", "1", "of", "1", "key", "changed"]

    def test_html(self):
        rows = ElementTree.fromstring(self.report()._repr_html_()).find("tbody")
        assert [row.find("td").text for row in rows] == ["weight", "rng"]

    def test_mapping(self):
        report = self.report()
        assert "weight" in report and "mean" not in report and dict(report)["rng"].changed == 1
        with pytest.raises(SelectionError, match="among those in .unchanged"):
            report["mean"]
        with pytest.raises(KeyError, match="no change at this path"):
            report["wieght"]


class TestErrors:
    def test_other_paths(self):
        class Longer(Net):
            def __init__(self):
                super().__init__()
                self.extra = State(0)

        with pytest.raises(StructureError, match="the two don't have the same Variables") as error:
            diff(Net(), Longer())
        assert (error.value.at, error.value.got) == ("extra", "before lacks extra")
        with pytest.raises(ValueError, match=r"after lacks weight, mean, count and 1 more; before lacks x"):
            diff(Net(), Cell(1.0))

    @pytest.mark.parametrize(("old", "new"), [([1.0], [1.0, 2.0]), ([1.0], [1])])
    def test_other_arrays(self, old, new):
        with pytest.raises(StructureError, match="not of the same kind, shape and dtype") as error:
            change(old, new)
        assert error.value.at == "x"
        assert error.value.expected == "before: State of float64[1]"

    def test_other_kind(self):
        class Other(tether.Module):
            def __init__(self):
                self.x = Param(1.0)

        with pytest.raises(StructureError, match="after: Param of float32"):
            diff(Cell(1.0), Other())

    @pytest.mark.parametrize("view", [lambda m: m, lambda m: m.eval(), tether.freeze])
    def test_no_copy(self, view):
        model = Net()
        with pytest.raises(ArgumentError, match="before and after are the same Variables"):
            diff(model, view(model))

    def test_traced(self):
        def f(model):
            return diff(model, tether.tree_at(lambda m: m.x, model, replace_fn=lambda x: x + 1))

        with pytest.raises(ArgumentError, match="only a shape") as error:
            jax.make_jaxpr(f)(Cell(1.0))
        assert (error.value.at, error.value.got) == ("x", "float32[] of a transformation")

    def test_abstract(self):
        with pytest.raises(ArgumentError, match="only a shape"):
            change(jax.ShapeDtypeStruct((2,), np.float32), np.ones(2, np.float32))

    def test_deleted(self):
        model = Cell(jnp.ones(2))
        before = jax.tree.map(lambda x: x, model)
        model.x = model.x + 1
        before.x.delete()
        with pytest.raises(ArgumentError, match="an array has been deleted") as error:
            diff(before, model)
        assert "snapshot" in str(error.value)

    def test_no_module(self):
        with pytest.raises(SelectionError, match="no module"):
            diff(jnp.ones(2), jnp.ones(2))

    def test_unknown_path(self):
        with pytest.raises(SelectionError, match="names nothing"):
            diff(Net(), Net(), "wieght")
