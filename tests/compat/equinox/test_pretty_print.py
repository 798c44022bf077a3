# SPDX-License-Identifier: Apache-2.0
"""Trees as text: each kind of thing, the options, and what a line holds."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tether.compat.equinox as eqx


class Layer(eqx.Module):
    weight: Any
    act: Any = jax.nn.relu
    name: str = eqx.static_field(default="layer")
    hidden: Any = dataclasses.field(default=0, repr=False)


class Pair(NamedTuple):
    a: Any
    b: Any


def function(x: Any) -> Any:
    return x


@functools.wraps(function)
def wrapper(x: Any) -> Any:
    return x


def inner() -> Any:
    def local(x: Any) -> Any:
        return x

    return local


ROWS = [
    (jnp.ones((3, 4)), "f32[3,4]"),
    (jnp.array(1), "i32[]"),  # of a weak type, which isn't said
    (jnp.ones(2, jnp.bfloat16), "bf16[2]"),
    (jnp.ones(2, jnp.uint8), "u8[2]"),
    (jnp.ones(2, jnp.complex64), "c64[2]"),
    (np.zeros((1, 2)), "f64[1,2](numpy)"),
    (np.array(True), "bool[](numpy)"),
    (1, "1"),
    (0.5, "0.5"),
    (None, "None"),
    ("a", "'a'"),
    (int, "<class 'int'>"),
    ((), "()"),
    ((1,), "(1,)"),
    ([1, (2, 3)], "[1, (2, 3)]"),
    ({"a": 1, 2: []}, "{'a': 1, 2: []}"),
    (Pair(1, jnp.ones(2)), "Pair(a=1, b=f32[2])"),
    (function, "<function function>"),
    (inner(), "<function local>"),
    (wrapper, "<wrapped function function>"),
    (functools.partial(function, 1), "<wrapped function function>"),
    (jax.tree_util.Partial(function, 1, y=2), "Partial(func=<function function>, args=(1,), keywords={'y': 2})"),
    (jax.custom_jvp(function), "<function function>"),
    (jax.custom_vjp(function), "<function function>"),
    (Layer(jnp.ones(2), act=None), "Layer(weight=f32[2], act=None, name='layer')"),
]


@pytest.mark.parametrize(("tree", "text"), ROWS, ids=[text for _, text in ROWS])
def test_each_kind(tree: Any, text: str):
    assert eqx.tree_pformat(tree) == text


def test_a_module_prints_itself():
    assert repr(Layer(jnp.ones(2), act=function)) == "Layer(weight=f32[2], act=<function function>, name='layer')"


def test_what_is_too_wide_is_broken_from_the_outside():
    tree = Layer([jnp.ones((100, 100)), jnp.ones((100, 100))], act=Layer(1, act=None))
    assert eqx.tree_pformat(tree, width=40, indent=4) == (
        "Layer(\n"
        "    weight=[f32[100,100], f32[100,100]],\n"
        "    act=Layer(\n"
        "        weight=1, act=None, name='layer'\n"
        "    ),\n"
        "    name='layer'\n"
        ")"
    )


def test_arrays_in_full():
    assert eqx.tree_pformat([np.array(1)], short_arrays=False) == "[array(1)]"
    assert eqx.tree_pformat([jnp.array([1, 2])], short_arrays=False) == "[Array([1, 2], dtype=int32)]"


def test_wrappers_as_they_are():
    # Without following, what is wrapped is a function like any other, or says itself what it is.
    assert eqx.tree_pformat(wrapper, follow_wrapped=False) == "<function function>"
    assert (
        eqx.tree_pformat(functools.partial(len, 1), follow_wrapped=False)
        == "functools.partial(<built-in function len>, 1)"
    )


def test_truncated():
    is_layer = lambda node: isinstance(node, Layer)
    assert eqx.tree_pformat([Layer(1), 2], truncate_leaf=is_layer) == "[Layer(...), 2]"


def test_a_list_in_itself():
    tree: list[Any] = [1]
    tree.append(tree)
    assert eqx.tree_pformat(tree) == "[1, <recursive>]"
