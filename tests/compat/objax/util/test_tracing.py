# SPDX-License-Identifier: Apache-2.0
"""The variables that functions name: their names and order, and what is no such name."""

from __future__ import annotations

import functools
import types
from typing import Any

import jax.numpy as jnp
import pytest

import tether.compat.objax as objax
from tether.compat.objax.util import find_used_variables

W = objax.TrainVar(jnp.zeros(5))
B = objax.StateVar(jnp.zeros(1))
MODEL = objax.nn.Linear(2, 1)
CONFIG = types.SimpleNamespace(model=MODEL, deep=types.SimpleNamespace(w=W), rate=0.1)


def found(fn: Any) -> list[str]:
    return list(find_used_variables(fn).keys())


def test_globals_in_the_order_of_their_use():
    vc = find_used_variables(lambda x: x * B.value + W.value)
    assert list(vc.keys()) == ["B", "W"] and vc["B"] is B and vc["W"] is W


def test_modules_with_the_name_in_front():
    vc = find_used_variables(lambda x: MODEL(x))
    assert list(vc.items()) == list(MODEL.vars(scope="MODEL.").items())
    assert list(vc.keys()) == ["MODEL.(Linear).b", "MODEL.(Linear).w"]


def test_the_closure_comes_before_globals():
    W = objax.TrainVar(jnp.ones(2))
    vc = find_used_variables(lambda: W.value)
    assert list(vc.keys()) == ["W"] and vc["W"] is W


def test_dotted_names():
    assert found(lambda x: CONFIG.model(x) * CONFIG.deep.w.value * CONFIG.rate) == [
        "CONFIG.model.(Linear).b",
        "CONFIG.model.(Linear).w",
        "CONFIG.deep.w",
    ]
    assert found(lambda: MODEL.w.value) == ["MODEL.(Linear).b", "MODEL.(Linear).w"]


def test_a_write_is_a_use():
    def count(x: Any) -> None:
        B.value += x
        CONFIG.deep.w.value = x

    assert found(count) == ["B", "CONFIG.deep.w"]


def test_functions_inside():
    def outer(x: Any) -> Any:
        def inner(y: Any) -> Any:
            return [W.value * y for _ in range(2) if MODEL is not None]

        return inner(x)

    assert set(found(outer)) == {"W", "MODEL.(Linear).b", "MODEL.(Linear).w"}


def test_local_names_are_not_looked_up():
    def own(W: Any) -> Any:
        MODEL = W

        def inner() -> Any:
            return MODEL

        return inner() + W

    assert found(own) == []


def test_defaults():
    assert found(lambda x, weight=W, *, layer=MODEL, rate=0.1: layer(x) * weight) == [
        "weight",
        "layer.(Linear).b",
        "layer.(Linear).w",
    ]


def test_methods_properties_and_lines_that_go_on():
    class Net(objax.Module):
        def __init__(self):
            self.w = objax.TrainVar(jnp.zeros(1))

        def loss(self, x: Any) -> Any:
            return self.w.value * x + B.value

    assert found(Net().loss) == ["B"]
    functions = [
        lambda: W.value,
        lambda: (
            B.value
        ),
    ]  # fmt: skip
    assert [found(f) for f in functions] == [["W"], ["B"]]


def test_no_source_is_needed():
    scope: dict[str, Any] = {"W": W}
    exec("def f(x):\n    return W.value * x", scope)
    assert found(scope["f"]) == ["W"]


def test_a_name_that_has_no_value_yet():
    def f() -> Any:
        return later.value + missing_everywhere  # type: ignore[name-defined]  # noqa: F821

    assert found(f) == []
    later = W
    assert found(f) == ["later"]


def test_many_names():
    # Beyond 255 names the bytecode has other instructions between.
    names = [f"v{k}" for k in range(300)]
    scope: dict[str, Any] = {name: types.SimpleNamespace(w=objax.StateVar(jnp.zeros(()))) for name in names}
    exec("def f():\n    return [" + ", ".join(f"{name}.w.value" for name in names) + "]", scope)
    assert found(scope["f"]) == [f"{name}.w" for name in names]


def test_auto_vars():
    double = objax.Function.auto_vars(lambda x: MODEL(x) * 2)
    assert list(double.vars().keys()) == ["{<lambda>}MODEL.(Linear).b", "{<lambda>}MODEL.(Linear).w"]

    @objax.Function.auto_vars
    def add(x: Any) -> Any:
        return x + B.value

    assert list(add.vars().keys()) == ["{add}B"]
    assert objax.Jit(add)(1.0).tolist() == [1]


class TestMistakes:
    @pytest.mark.parametrize("fn", [functools.partial(lambda x: x, 1), MODEL, len])
    def test_no_function(self, fn: Any):
        with pytest.raises(ValueError) as caught:
            find_used_variables(fn)
        assert str(caught.value) == (
            "Can not determine variables used by a function. Function does not have __code__ attribute.\n"
            f"  got:      {type(fn).__name__} object\n"
            "  expected: a function that is written in Python\n"
            "  fix:      one of\n"
            "    1. fn.vars(), if it is a module\n"
            "    2. objax.Jit(fn), which finds them without"
        )
