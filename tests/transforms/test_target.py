# SPDX-License-Identifier: Apache-2.0
"""What a call differentiates: each Variable once, numbers that keep apart, trees that come back as they were."""

from __future__ import annotations

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tether
from tether import nn
from tether._transforms._target import Differentiable, Rule, Target, dtype_of
from tether.errors import GradientError

ANY = Rule("test", hands_through=True)


class Tied(tether.Module):
    def __init__(self):
        self.a, self.b = nn.Linear(2, 2, use_bias=False), nn.Linear(2, 2)
        self.b.weight = tether.cell(self.a, "weight")
        self.count = tether.State(0)


def make(trees, rule=ANY, select=tether.Param):
    return Target(rule, trees, [f"t{i}" for i in range(len(trees))], select, tuple(range(len(trees))))


def test_each_variable_once_each_leaf_by_itself():
    tied, x = Tied(), jnp.ones(2)
    target = make([{"m": tied, "x": x}, [tied, x, tether.cell(tied, "b.bias"), 3, "text", None]])
    assert list(target.variables) == [tether.cell(tied, "a.weight"), tether.cell(tied, "b.bias")]
    values = target.values()
    assert [v.shape for v in values] == [(2, 2), (2,), (2,), (2,)]
    assert values[0] is tied.a.weight and values[1] is tied.b.bias and values[2] is x and values[3] is x

    first, second = target.layout.filled(["weight", "bias", "x", "y"])
    for module in (first["m"], second[0]):
        assert isinstance(module, Tied) and module.count is None
        assert (module.a.weight, module.b.weight, module.b.bias) == ("weight", "weight", "bias")
    assert (first["x"], second[1], second[2]) == ("x", "y", "bias")
    assert second[3].dtype == jax.dtypes.float0 and second[4:] == [None, None]
    assert target.layout.places() == [["t0['m']", "t0['x']"], ["t1[0]", "t1[1]", "t1[2]", "t1[3]", "t1[4]"]]

    (one, two) = target.rebuilt(["weight", "bias", "x", "y"])
    assert (one["m"], one["x"], two[1]) == (tied, "x", "y")
    assert two[2] is tether.cell(tied, "b.bias") and two[3:] == [3, "text", None]


def test_a_layout_keeps_no_arrays_alive():
    model = nn.Linear(2, 2)
    target = make([model, jnp.ones(3)])
    layout, gone = target.layout, [weakref.ref(value) for value in target.values()]
    del model, target
    gc.collect()
    assert layout.filled([1, 2, 3])[0].weight == 1 and not any(ref() is not None for ref in gone)


def test_rules():
    with pytest.raises(GradientError, match="grad: an argument has no float"):
        make([3], Rule("grad"))
    assert make([3], Rule("grad", allow_int=True)).values() == [3]
    for kind, value in ((jnp.floating, 2j), (jnp.complexfloating, 2.0)):
        with pytest.raises(GradientError, match="grad: an argument has the wrong dtype"):
            make([value], Rule("grad", inputs=kind))
    assert make([nn.Linear(2, 2)], select="bias").values()[0].shape == (2,)
    assert make([tether.freeze(nn.Linear(2, 2))]).is_empty()


def test_dtypes():
    assert dtype_of(1.0) == jnp.float32 and dtype_of(True) == np.bool_ and dtype_of(np.float32(1)) == np.float32
    for value in ("text", None, np.array(["text"]), [1.0], jax.ShapeDtypeStruct((), float)):
        assert dtype_of(value) is None


def test_inside_and_outside():
    net, calls = nn.Linear(2, 2, use_bias=False), tether.State(0)

    def fun(net, x, *, scale):
        calls.value = calls.value + 1
        return {"y": scale * (net.weight @ x)}, ("text", net, x)

    target = Target(ANY, [net], ["net"], tether.Param, (0,))
    function = Differentiable(ANY, fun, (net, jnp.ones(2)), {"scale": 2.0}, target, has_aux=True)
    out, (aux, written) = function.inside([jnp.eye(2)])
    assert [part.tolist() for part in out] == [[2.0, 2.0]]
    assert len(aux) == 2 and aux[0] is None and aux[1].tolist() == [1.0, 1.0]
    assert int(written[0]) == 1 and int(calls.value) == 0
    result, (text, same, x) = function.outside(["whatever"], (aux, written))
    assert result == {"y": "whatever"} and text == "text" and same is net and x.tolist() == [1.0, 1.0]
    assert int(calls.value) == 1 and net.weight.tolist() != [[1.0, 0.0], [0.0, 1.0]]
