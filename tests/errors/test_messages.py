# SPDX-License-Identifier: Apache-2.0
"""Every message, word for word, and that a fault changes nothing: the next call works.

``messages.txt`` and ``messages_of_transforms.txt`` are read by people: a changed message is changed there by hand, and
read again as a user would.
"""

from __future__ import annotations

import pickle
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tether
from tests.errors import cases, cases_of_transforms
from tests.errors.cases import BAD_INPUT, Held, Net, X
from tether import errors, nn
from tether._core import frame
from tether.errors import LostUpdateWarning, TetherError, UnusedViewWarning
from tether.random._streams import default_stream

pytestmark = pytest.mark.filterwarnings("ignore::tether.errors.TetherWarning")
CASES = {**cases.CASES, **cases_of_transforms.CASES}


def recorded() -> dict[str, tuple[str, str]]:
    """Name of the case -> class and text."""
    files = [Path(__file__).parent / name for name in ("messages.txt", "messages_of_transforms.txt")]
    text = "".join(file.read_text() for file in files)
    found = {}
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        head, _, body = section.partition("\n")
        name, _, cls = head.partition(" | ")
        found[name] = cls, body.rstrip("\n")
    return found


RECORDED = recorded()


def normalized(error: BaseException) -> str:
    """The text without what differs from machine to machine: folders and line numbers."""
    return re.sub(r"\S*/(\w+\.py):\d+", r"\1:LINE", str(error))


def values(model: Any) -> list[Any]:
    thread = frame.thread
    assert (thread.frames, thread.training, thread.stream, thread.constructing) == ([], None, None, None)
    found = {path: variable._value for path, variable in tether.variables(model).items()}
    assert not any(isinstance(value, jax.core.Tracer) for value in found.values())
    keys = jax.random.key_data(default_stream.value).tolist()
    plain = lambda v: jax.random.key_data(v) if jnp.issubdtype(v.dtype, jax.dtypes.prng_key) else v
    return [keys, *((path, np.asarray(plain(value)).tolist()) for path, value in found.items())]


@pytest.mark.parametrize("name", CASES)
def test_message(name: str):
    net = Net()
    tether.seed(0)
    structure, training = jax.tree.structure(net), net.training
    before = values(net)
    with pytest.raises(Exception) as caught:
        CASES[name](net)
    error = caught.value
    assert isinstance(error, TetherError)
    assert (type(error).__name__, normalized(error)) == RECORDED[name]
    # Nothing is lost. (A new Linear of a case may have drawn its weights from the default stream.)
    after = values(net)
    assert after[1:] == before[1:]
    assert jax.tree.structure(net) == structure and net.training == training
    count = int(net.count)
    assert net(X, key=jax.random.key(0)).shape == (4, 3) and int(net.count) == count + 1


def test_nothing_is_recorded_in_vain():
    assert list(RECORDED) == list(CASES)
    assert not cases.CASES.keys() & cases_of_transforms.CASES.keys()


@pytest.mark.parametrize("name", BAD_INPUT)
def test_bad_input_has_every_row(name: str):
    """Path, got, expected, fix: for the faults that people make most."""
    with pytest.raises(TetherError) as caught:
        CASES[name](Net())
    error = caught.value
    assert error.at and error.got and error.expected and error.fixes


@pytest.mark.parametrize("name", RECORDED)
def test_form(name: str):
    """One line that is complete by itself, then rows; never an array's contents, never an unnamed object."""
    first, *rows = RECORDED[name][1].split("\n")
    assert first.endswith(".") and not first.startswith(" ") and len(first) < 120
    for row in rows:
        assert re.match(r"  (at|got|expected|fix): +\S|    \d\. \S", row), row
        assert " object at 0x" not in row and "Array(" not in row and "<class" not in row.replace("<class 'int'>", "")


def test_compiled_functions_work_after_a_fault():
    net = Net()
    step = tether.jit(lambda net, x: net(x))
    with pytest.raises(errors.ShapeError, match="in_features"):
        step(net, jnp.ones((4, 5)))
    assert int(net.count) == 0
    step(net, X)
    assert int(net.count) == 1 and step.traces == 1


class TestFixes:
    """The fix that a message names works when it is pasted."""

    def test_replace_of_a_submodule(self):
        model = Net()
        new = nn.Linear(2, 3)
        assert tether.replace(model, {"linear": new}).linear is new
        assert isinstance(tether.replace(model, {"blocks[0]": nn.LayerNorm(3)}).blocks[0], nn.LayerNorm)

    def test_view_of_a_setting(self):
        assert tether.view(Net(), width=5).width == 5

    def test_static(self):
        assert Held(tether.Static({1, 2})).part == {1, 2}
        f = tether.jit(lambda x, c: x * len(c.value), static_argnames="c")
        assert float(f(1.0, c=tether.Static({1, 2}))) == 2

    def test_dict_of_cells(self):
        model = Net()
        model.cells = {**model.cells, "a": jnp.ones(2)}
        assert model.cells["a"].tolist() == [1, 1]

    def test_mode(self):
        model = Net()
        assert model.eval().training is False and model(X, training=False).shape == (4, 3)

    def test_constant(self):
        model = Net()
        tether.update(model, {"table": jnp.zeros(2)})
        assert model.table.tolist() == [0, 0]

    def test_tie(self):
        class Tied(tether.Module):
            def __init__(self):
                self.embed, self.head = nn.Linear(2, 2), nn.Linear(2, 2)
                self.head.weight = tether.cell(self.embed, "weight")

        class Copied(tether.Module):
            def __init__(self):
                self.embed, self.head = nn.Linear(2, 2), nn.Linear(2, 2)
                self.head.weight = jnp.array(self.embed.weight)

        assert (len(tether.variables(Tied())), len(tether.variables(Copied()))) == (3, 4)

    @pytest.mark.parametrize("rule", ["stack", "discard", "mean", "sum"])
    def test_rules_of_vmap(self, rule: str):
        class Lane(tether.Module):
            def __init__(self):
                self.last = tether.State(jnp.zeros(3) if rule == "stack" else 0.0)

            def __call__(self, x: Any) -> Any:
                self.last = x
                return x

        lane = Lane()
        tether.vmap(lane, writes={"last": rule})(jnp.arange(3.0))
        assert lane.last.tolist() == {"stack": [0, 1, 2], "discard": 0, "mean": 1, "sum": 3}[rule]

    def test_pure(self):
        net = Net()
        p = tether.pure(net.linear)
        out, new = jax.jit(p)(p.values(), X)
        np.testing.assert_allclose(out, net.linear(X), rtol=1e-6)
        assert "weight" in new

    def test_clone_of_both(self):
        model = Net()
        optimizer = tether.Optimizer(model, optax.sgd(0.1))
        new_model, new_optimizer = tether.clone((model, optimizer))
        new_optimizer.update({"linear.bias": jnp.ones(3)})
        assert not np.array_equal(new_model.linear.bias, model.linear.bias)

    def test_stacked(self):
        modules = tether.stack([nn.Linear(2, 2), nn.Linear(2, 2)])
        assert tether.vmap(lambda member, x: member(x))(modules, jnp.ones((2, 2))).shape == (2, 2)
        assert tether.index(modules, 0)(X).shape == (4, 2)
        keys = jax.random.split(jax.random.key(0))
        assert tether.vmap(lambda key: nn.Linear(2, 2, key=key))(keys).weight.shape == (2, 2, 2)


def test_view_thrown_away():
    with pytest.warns(UnusedViewWarning) as caught:
        Net().eval()
    assert str(caught[0].message) == (
        "a view was made (training=False) and thrown away: it changes nothing by itself.\n"
        "  fix:      keep it (evaluating = model.eval()), call it (model.eval()(x)), "
        "or pass the mode at the call (model(x, training=False))"
    )


def test_update_lost_by_value():
    """At the line that wrote it; tests/transforms/test_plain_by_value.py has what warns and what doesn't."""
    norm, line = nn.BatchNorm(2), 2 + sys._getframe().f_lineno
    with pytest.warns(LostUpdateWarning) as caught:
        jax.jit(lambda norm, x: norm(x))(norm, X)
    assert [(warning.filename, warning.lineno) for warning in caught] == [(__file__, line)]
    assert str(caught[0].message) == (
        "a module was passed by value to a plain JAX transformation, and what was written to it is lost.\n"
        "  at:       mean  (State), var  (State)\n"
        "  fix:      a Tether transformation (tether.jit, tether.grad, ...), where the module is the caller's; "
        "or return the module, and use what comes back"
    )


class TestErrorClasses:
    CLASSES = [getattr(errors, name) for name in errors.__all__ if name.endswith("Error") and name != "TetherError"]

    @pytest.mark.parametrize("cls", CLASSES)
    def test_inherits_the_builtin_that_one_would_catch(self, cls: type[TetherError]):
        builtin = [base for base in cls.__mro__ if base.__module__ == "builtins" and base not in (Exception, object)]
        assert issubclass(cls, TetherError) and len(builtin) > 1

    @pytest.mark.parametrize("cls", CLASSES)
    def test_pickles(self, cls: type[TetherError]):
        error = cls("what: it is.", at="a.b  (Param)", got="x", expected="y", fix=["one", "two"])
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is cls and str(again) == str(error)

    def test_text(self):
        assert str(TetherError("op: fault.")) == "op: fault."
        assert str(TetherError("op: fault.", at="a", got="b", expected="c", fix="d")) == (
            "op: fault.\n  at:       a\n  got:      b\n  expected: c\n  fix:      d"
        )
        assert str(errors.SelectionError("op: fault.", fix=["d", "e"])) == (
            "op: fault.\n  fix:      one of\n    1. d\n    2. e"
        )

    @pytest.mark.parametrize(
        ("value", "text"),
        [
            (jnp.ones((2, 3)), "float32[2, 3]"),
            (np.float64(3), "float64[]"),
            (jax.random.key(0), "key<fry>[]"),
            (jax.ShapeDtypeStruct((2,), jnp.int8), "int8[2]"),
            (True, "True"),
            ("a", "'a'"),
            (None, "None"),
            (int, "the class int"),
            ([1, 2], "list of 2"),
            ({"a": 1}, "dict of 1"),
            (object(), "object object"),
        ],
    )
    def test_describe(self, value: Any, text: str):
        assert errors.describe(value) == text


def test_no_warning_is_an_error_of_its_own():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        net = Net()
        tether.jit(net)(X)
