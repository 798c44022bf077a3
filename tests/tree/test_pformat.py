# SPDX-License-Identifier: Apache-2.0
"""Trees as text: each kind of thing, modules, and the options."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tether
from tether import nn


class Pair(NamedTuple):
    a: Any
    b: Any


@dataclasses.dataclass
class Settings:
    rate: Any
    name: str = "default"
    hidden: Any = dataclasses.field(default=0, repr=False)


class Says:
    def __pdoc__(self, **_: Any) -> Any:
        import wadler_lindig

        return wadler_lindig.TextDoc("<as it likes>")


def function(x: Any) -> Any:
    return x


@functools.wraps(function)
def wrapper(x: Any) -> Any:
    return x


STRUCT = jax.ShapeDtypeStruct((2, 3), jnp.float32)
ROWS = [
    (jnp.ones((3, 4)), "f32[3,4]"),
    (jnp.array(1), "weak_i32[]"),
    (jnp.ones(2, jnp.bfloat16), "bf16[2]"),
    (jax.random.key(0), "key<fry>[]"),
    (np.zeros((1, 2)), "f64[1,2](numpy)"),
    (STRUCT, "ShapeDtypeStruct(shape=(2, 3), dtype=float32)"),
    ((1,), "(1,)"),
    ([1, None, {"a": "b"}], "[1, None, {'a': 'b'}]"),
    (Pair(1, jnp.ones(2)), "Pair(a=1, b=f32[2])"),
    (Settings(jnp.ones(2)), "Settings(rate=f32[2])"),
    (Settings(1, "other"), "Settings(rate=1, name='other')"),
    (function, "<function function>"),
    (wrapper, "<wrapped function function>"),
    (functools.partial(function, 1, y=jnp.ones(2)), "partial(<function function>, 1, y=f32[2])"),
    (jax.tree_util.Partial(function, jnp.ones(2)), "Partial(func=<function function>, args=(f32[2],), keywords={})"),
    (jax.custom_jvp(function), "<function function>"),
    (jax.custom_vjp(function), "<function function>"),
    (jax.jit(function), "<jitted function function>"),
    (Says(), "<as it likes>"),
    (tether.Param(jnp.ones(2)), "Param(f32[2])"),
    (tether.State({"k": jnp.ones(2)}), "{'k': State(f32[2])}"),
    (nn.Dropout(0.5), "Dropout(p=0.5, shared_axes=())"),
]


@pytest.mark.parametrize(("tree", "text"), ROWS, ids=[text for _, text in ROWS])
def test_each_kind(tree: Any, text: str):
    assert tether.tree_pformat(tree) == text


class Model(tether.Module):
    def __init__(self):
        self.layers = [nn.Linear(2, 3), function]
        self.cells = {"a": tether.Constant(jnp.ones(2))}
        self.cache = tether.State({"k": jnp.zeros(2)})
        self.opaque = tether.Static(Settings(1))
        self.rng = tether.Rng(0)


TEXT = """\
Model(
  layers=(
    Linear(
      in_features=2,
      out_features=3,
      compute_dtype=None,
      weight=Param(f32[3,2]),
      bias=Param(f32[3])
    ),
    <function function>
  ),
  cells={'a': Constant(f32[2])},
  cache={'k': State(f32[2])},
  opaque=Settings(rate=1),
  rng=Rng(key<fry>[])
)"""


class TestModules:
    def test_attributes_and_cells(self):
        assert tether.tree_pformat(Model(), width=60) == TEXT

    def test_what_tree_functions_put_into_cells(self):
        scale = nn.RMSNorm(3)
        none = jax.tree.map(lambda _: None, scale)
        assert "weight=Param(None)" in tether.tree_pformat(none)
        shapes = tether.eval_shape(lambda: nn.RMSNorm(3))
        assert "weight=Param(f32[3])" in tether.tree_pformat(shapes, struct_as_array=True)

    def test_values_as_they_are_in_a_transformation(self):
        seen = []
        layer = nn.RMSNorm(3)
        jax.vmap(lambda layer: seen.append(tether.tree_pformat(layer)))(tether.tree.stack([layer] * 2))
        assert "weight=Param(f32[3])" in seen[0]

    def test_what_is_referred_to_is_named(self):
        text = tether.tree_pformat(tether.Optimizer(nn.Linear(2, 3), optax.sgd(0.1)), width=60)
        assert "\n  model=Linear(...),\n" in text


class TestOptions:
    def test_indent(self):
        assert (
            tether.tree_pformat({"key": [1, 2]}, width=8, indent=4)
            == "{\n    'key':\n    [\n        1,\n        2\n    ]\n}"
        )

    def test_arrays_in_full(self):
        assert tether.tree_pformat([jnp.array([1, 2])], short_arrays=False) == "[Array([1, 2], dtype=int32)]"
        assert tether.tree_pformat([np.array(1)], short_arrays=False) == "[array(1)]"

    def test_structs_as_arrays(self):
        assert tether.tree_pformat([STRUCT], struct_as_array=True) == "[f32[2,3]]"

    def test_truncated(self):
        is_linear = lambda node: isinstance(node, nn.Linear)
        assert tether.tree_pformat([nn.Linear(2, 3), 1], truncate_leaf=is_linear) == "[Linear(...), 1]"
        in_model = tether.tree_pformat(Model(), truncate_leaf=is_linear)
        assert "layers=(Linear(...), <function function>)" in in_model

    def test_in_a_partial_too(self):
        partial = jax.tree_util.Partial(function, Settings(1))
        text = tether.tree_pformat(partial, truncate_leaf=lambda node: isinstance(node, Settings))
        assert text == "Partial(func=<function function>, args=(Settings(...),), keywords={})"


def test_a_list_in_itself():
    tree: list[Any] = [1]
    tree.append(tree)
    assert tether.tree_pformat(tree) == "[1, <recursive>]"


def test_pprint_prints(capsys: pytest.CaptureFixture[str]):
    tether.tree_pprint([jnp.ones(2), jnp.ones(2)], width=10, indent=1)
    assert capsys.readouterr().out == "[\n f32[2],\n f32[2]\n]\n"
