# SPDX-License-Identifier: Apache-2.0
"""A thousand models made, used and dropped leave no buffers, no objects of the library and nothing in its caches."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tether
from tests.laws.trees import examples
from tether import nn
from tether._core import trace
from tether._core.structure import Structure
from tether._transforms import _jit

X = np.ones((4, 2), np.float32)
TX = optax.sgd(0.1, momentum=0.9)


class Net(tether.Module):
    """Has a cell of every kind that layers have, a tie, and a cache of a pytree."""

    def __init__(self, value: Any = 1.0):
        self.weight = tether.Param(jnp.full((2, 2), value, jnp.float32))
        self.norm = nn.BatchNorm(2)
        self.drop = nn.Dropout(0.5)
        self.layers = [self.norm]
        self.cache = tether.State({"count": 0, "last": jnp.zeros(2)})

    def __call__(self, x: Any) -> Any:
        self.cache = {"count": self.cache["count"] + 1, "last": x.sum(0)}
        return self.drop(self.layers[0](x @ self.weight))


def loss(model: Net, x: Any) -> Any:
    return (model(x) ** 2).mean()


def fails(model: Net, x: Any) -> Any:
    model(x)
    raise ValueError("on purpose")


def train(model: Net, optimizer: tether.Optimizer, x: Any) -> Any:
    value, gradient = tether.value_and_grad(loss)(model, x)
    optimizer.update(gradient)
    return model, value


class Functions:
    """The compiled functions of one test, which outlive the models."""

    def __init__(self) -> None:
        self.train, self.donating = tether.jit(train), tether.jit(train, donate_state=True)
        self.evaluate = tether.jit(lambda model, x: model(x))
        self.fails = tether.jit(fails)
        self.lanes = tether.jit(tether.vmap(lambda model, x: model.drop(x @ model.weight), in_axes=(None, 0)))
        self.makes = tether.jit(lambda value: Net(value))

    def all(self) -> list[Any]:
        return list(vars(self).values())


# What is done with one model; it is dropped afterwards.


def trained(f: Functions, model: Net) -> None:
    optimizer = tether.Optimizer(model, TX)
    for _ in range(2):
        f.train(model, optimizer, X)


def trained_donating(f: Functions, model: Net) -> None:
    optimizer = tether.Optimizer(model, TX)
    for _ in range(2):
        f.donating(model, optimizer, X)


def viewed(f: Functions, model: Net) -> None:
    f.evaluate(model.eval(), X)
    f.evaluate(tether.freeze(model, "norm"), X)


def mapped(f: Functions, model: Net) -> None:
    f.lanes(model, X)


def made_inside(f: Functions, model: Net) -> None:
    f.makes(model.weight[0, 0])


def copied(f: Functions, model: Net) -> None:
    one, two = tether.clone(model), tether.snapshot(model)
    copy.deepcopy(model)
    pickle.loads(pickle.dumps(model))
    jax.tree.map(lambda x: x, model)
    tether.update(one, two)
    tether.bind(model, {"weight": two.weight})
    tether.stack([one, two])


def failed_in_jit(f: Functions, model: Net) -> None:
    with pytest.raises(ValueError, match="on purpose"):
        f.fails(model, X)


def failed_in_grad(f: Functions, model: Net) -> None:
    with pytest.raises(ValueError, match="on purpose"):
        tether.grad(fails)(model, X)


def differentiated(f: Functions, model: Net) -> None:
    tether.grad(loss)(model, X)


def uncompiled(f: Functions, model: Net) -> None:
    tether.vmap(lambda x: x @ model.weight)(X)
    tether.eval_shape(model, X)
    tether.uses(model)(X)


def closed_over(f: Functions, model: Net) -> None:
    tether.jit(lambda x: x @ model.weight)(X)
    tether.jit(model.eval())(X)


def smuggled(f: Functions, model: Net) -> None:
    """A module made in a trace and kept outside: an error to use, nothing to keep."""
    box: list[Any] = []
    tether.grad(lambda x: (box.append(nn.LayerNorm(2)), x)[1])(1.0)
    model.cache["last"].block_until_ready()


# How often: a thousand times what is cheap, as often as there is time for what is traced each time.
USES = {
    trained_donating: 1000,
    **dict.fromkeys((trained, viewed, mapped, made_inside, smuggled), 200),
    copied: 50,
    **dict.fromkeys((differentiated, failed_in_jit, failed_in_grad, uncompiled), 20),
    closed_over: 5,
}


def census(functions: Functions) -> dict[str, Any]:
    """Everything that could grow."""
    gc.collect()
    classes = [type(thing) for thing in gc.get_objects() if type(thing) is not trace.Key]  # in JAX's bounded caches
    ours = [cls.__qualname__ for cls in classes if str(cls.__module__).startswith(("tether", __name__))]
    sizes = {name: (len(f._plans), len(f._programs)) for name, f in vars(functions).items()}
    return {"arrays": len(jax.live_arrays()), "structures": len(Structure._interned), **sizes, **Counter(ours)}


@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
def test_dropped_models_leave_nothing(use: Any):
    functions = Functions()
    for _ in range(3):
        use(functions, Net())
    before = census(functions)
    traces = [f.traces for f in functions.all()]
    for i in range(examples(USES[use])):
        use(functions, Net(i))
    assert census(functions) == before
    assert [f.traces for f in functions.all()] == traces
    assert not any(f._plans for f in functions.all() if f is not functions.makes)


def test_a_model_goes_with_its_last_name():
    """Not only at the next garbage collection: a model refers to nothing that refers to it."""
    functions = Functions()
    model = Net()
    optimizer = tether.Optimizer(model, TX)
    functions.train(model, optimizer, X)
    functions.donating(model, optimizer, X)
    functions.evaluate(model.eval(), X)
    gone = [weakref.ref(thing) for thing in (model, optimizer, *tether.variables(model).values())]
    gc.collect()
    gc.disable()
    try:
        del model, optimizer
        assert not any(reference() for reference in gone)
    finally:
        gc.enable()


def test_a_function_keeps_a_bounded_number_of_programs(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_jit, "_MOST_KEPT", 3)
    models = [tether.view(Net(), p=p / 10) for p in range(6)]
    f = tether.jit(lambda model: model.drop.p)
    for _ in range(2):
        assert [f(model) for model in models] == [0.0, 0.1, 0.2, 0.3, 0.4, 0.5]
    assert len(f._plans) <= 3 and len(f._programs) <= 3


def test_a_schedule_of_views_leaves_nothing():
    """A view with another setting at every step, of a model that lives on."""
    model = Net()
    structures = []
    for step in range(1000):
        view: Any = tether.view(model, p=step / 1000)
        assert view.drop.p == step / 1000
        if step in (200, 999):
            del view
            gc.collect()
            structures.append(len(Structure._interned))
    assert structures[0] == structures[1]
