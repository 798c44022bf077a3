# SPDX-License-Identifier: Apache-2.0
"""Programs with a fault in them, each of which must end in a clear error and change nothing."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
import optax

import tether
from tether import nn


class Net(tether.Module):
    """Something of everything."""

    def __init__(self):
        self.linear = nn.Linear(2, 3)
        self.blocks = [nn.BatchNorm(3), nn.Dropout(0.5)]
        self.count = tether.State(0)
        self.flag = tether.State(False)
        self.table = tether.Constant(jnp.ones(2))
        self.rng = tether.Rng(0)
        self.by_name = {"a": nn.Linear(2, 2)}
        self.cells = {"a": tether.Param(jnp.zeros(2))}
        self.cache = tether.State({"k": jnp.zeros(2)})
        self.width = 3

    def __call__(self, x: Any) -> Any:
        self.count = self.count + 1
        for layer in (self.linear, *self.blocks):
            x = layer(x)
        return x


class Lane(tether.Module):
    def __init__(self):
        self.last = tether.State(0.0)

    def __call__(self, x: Any) -> Any:
        self.last = x
        return x


class Held(tether.Module):
    def __init__(self, part: Any):
        self.part = part


class Tied(tether.Module):
    def __init__(self):
        self.embed = nn.Linear(2, 2)
        self.head = nn.Linear(2, 2)
        self.head.weight = self.embed.weight


class Shape(tether.Module):
    size: tether.AbstractVar[int]
    symbol: tether.AbstractClassVar[str]

    @abc.abstractmethod
    def area(self) -> int: ...


@final
class Closed(tether.Module): ...


def with_a_value() -> None:
    class Round(Shape):
        size: tether.AbstractVar[int] = 3


def assign(target: str, value: Any) -> Callable[[Any], Any]:
    """A program that writes an attribute of the model."""

    def program(net: Any) -> None:
        *path, name = target.split(".")
        for part in path:
            net = getattr(net, part)
        setattr(net, name, value)

    return program


def smuggle(net: Any) -> Any:
    box: list[Any] = []

    @tether.jit
    def f(x: Any) -> Any:
        box.append(tether.State(x))
        return x

    f(jnp.ones(2))
    return box[0].value


def read_after_write(x: Any) -> Any:
    LANE.last = x
    return LANE.last * x


def with_a_rule(net: Any) -> Callable[[Any], Any]:
    f = jax.custom_jvp(lambda x: (net.linear.bias * x).sum())
    f.defjvps(lambda tangent, out, x: tangent)
    return lambda net: f(1.0)


def read_then_write(net: Any) -> Any:
    total = jax.lax.map(lambda x: x + net.linear.bias[0], jnp.ones(2))
    net.linear.bias = jnp.ones(3)
    return total


def tangent_into_a_ref() -> None:
    lane = Lane()
    jax.jit(lambda x: lane.last * x)(1.0)
    jax.grad(lane)(1.0)


LANE = Lane()
X = jnp.ones((4, 2))
SCALAR = lambda net: net(X).sum()


def donated_copy(net: Any) -> Any:
    cell = tether.State(jnp.zeros(2))
    step = tether.jit(lambda: setattr(cell, "value", cell.value + 1), donate_state=True)
    step()
    step()
    held = Held(tether.State(0.0))
    shared = jax.tree.map(lambda _: cell.value, held)
    step()
    return tether.jit(lambda: shared.part * 2)()


def many(net: Any) -> Any:
    return tether.Optimizer(net, optax.sgd(0.1))


CASES: dict[str, Callable[[Any], Any]] = {
    "write of another shape": assign("linear.weight", jnp.ones((2, 3))),
    "write of a lossy kind": assign("count", 2.7),
    "write of 2 to a bool": assign("flag", 2),
    "write of no array": assign("linear.weight", "abc"),
    "write of a cell": assign("linear.weight", tether.Param(jnp.ones((3, 2)))),
    "write to a constant": assign("table", jnp.zeros(2)),
    "write of no key": assign("rng", jnp.ones(2)),
    "write of another tree": assign("cache", {"k": jnp.zeros(2), "v": jnp.zeros(2)}),
    "write into a dict of cells": lambda net: net.cells.__setitem__("a", jnp.ones(2)),
    "write into a dict of modules": lambda net: net.by_name.__setitem__("b", nn.Linear(2, 2)),
    "new attribute": assign("linear.extra", 1),
    "replaced submodule": assign("linear", nn.Linear(2, 3)),
    "replaced list": assign("blocks", [nn.Linear(2, 3)]),
    "replaced setting": assign("linear.in_features", 4),
    "deleted attribute": lambda net: delattr(net, "width"),
    "assigned training": assign("training", False),
    "bare array": lambda net: Held(jnp.ones(2)),
    "bare array in a list": lambda net: Held([1, {"k": np.ones(2)}]),
    "tie by value": lambda net: Tied(),
    "unhashable setting": lambda net: Held({1, 2}),
    "hidden module": lambda net: Held(frozenset([nn.Linear(2, 2)])),
    "abstract class": lambda net: Shape(),
    "abstract attribute left out": lambda net: type("Square", (Shape,), {"symbol": "s", "area": lambda self: 1})(),
    "abstract attribute with a value": lambda net: with_a_value(),
    "base that is final": lambda net: type("Open", (Closed,), {}),
    "per-lane write": lambda net: tether.vmap(Lane())(jnp.arange(3.0)),
    "per-lane write, plain": lambda net: jax.vmap(Lane())(jnp.arange(3.0)),
    "smuggled Variable": smuggle,
    "lost gradient": lambda net: jax.grad(read_after_write)(1.0),
    "plain checkpoint": lambda net: jax.checkpoint(lambda x: net.linear(x))(X),
    "plain vmap of jit": lambda net: jax.vmap(jax.jit(lambda x: setattr(net, "flag", True) or x))(X),
    "plain scan inside": lambda net: tether.jit(lambda: jax.lax.map(lambda x: setattr(net, "flag", True) or x, X))(),
    "plain custom rule": lambda net: tether.grad(with_a_rule(net))(net),
    "plain read, then write": lambda net: jax.jit(read_then_write)(net),
    "tangent into a Ref": lambda net: tangent_into_a_ref(),
    "wrong channel count": lambda net: net.linear(jnp.ones((4, 5))),
    "wrong rank": lambda net: nn.Conv2d(1, 1, 3)(jnp.ones((4, 4))),
    "one value per channel": lambda net: nn.BatchNorm(2)(jnp.ones((1, 2))),
    "argnums out of range": lambda net: tether.grad(lambda x, y: x, argnums=2)(1.0, 2.0),
    "argnums of no name": lambda net: tether.grad(lambda x, y: x, argnums="z")(1.0, 2.0),
    "argnums True": lambda net: tether.grad(lambda x, y: x, argnums=True)(1.0, 2.0),
    "argnums twice": lambda net: tether.grad(lambda x, y: x, argnums=(0, -2))(1.0, 2.0),
    "static_argnums out of range": lambda net: tether.jit(lambda x: x, static_argnums=1)(1.0),
    "static_argnames of no name": lambda net: tether.jit(lambda x: x, static_argnames="y"),
    "unhashable static argument": lambda net: tether.jit(lambda x, c: x, static_argnames="c")(1.0, c={1}),
    "gradient of an int": lambda net: tether.grad(lambda x: x)(1),
    "gradient of a model without floats": lambda net: tether.grad(lambda m: 1.0)(Held(tether.State(0))),
    "gradient of no scalar": lambda net: tether.grad(lambda m: m(X))(net),
    "gradient of None": lambda net: tether.grad(lambda x: None)(1.0),
    "has_aux without a pair": lambda net: tether.grad(lambda x: x, has_aux=True)(1.0),
    "argnums and wrt": lambda net: tether.grad(SCALAR, argnums=0, wrt=net),
    "optimizer: gradient without a slot": lambda net: many(net).update({"count": jnp.ones(())}),
    "optimizer: gradient of another shape": lambda net: many(net).update({"linear.bias": jnp.ones(2)}),
    "optimizer: no gradient at all": lambda net: many(net).update({}),
    "optimizer: no gradients": lambda net: many(net).update(jnp.ones(2)),
    "optimizer: a copy": lambda net: tether.clone(many(net)).update({"linear.bias": jnp.ones(3)}),
    "optimizer: nothing to train": lambda net: tether.Optimizer(tether.freeze(net), optax.sgd(0.1)),
    "optimizer: arguments swapped": lambda net: tether.Optimizer(optax.sgd(0.1), net),  # type: ignore[arg-type]
    "optimizer: no transformation": lambda net: tether.Optimizer(net, 0.1),  # type: ignore[arg-type]
    "stacked called": lambda net: tether.stack([nn.Linear(2, 2), nn.Linear(2, 2)])(X),
    "unstacked indexed": lambda net: tether.index(net, 0),
    "no such member": lambda net: tether.index(tether.stack([nn.Linear(2, 2)] * 2), 2),
    "stack of nothing": lambda net: tether.stack([]),
    "stack of different settings": lambda net: tether.stack([nn.Dropout(0.1), nn.Dropout(0.2)]),
    "stack of different shapes": lambda net: tether.stack([nn.LayerNorm(2), nn.LayerNorm(3)]),
    "vmap: unstacked mapped": lambda net: tether.vmap(lambda m, x: m(x), in_axes=(0, 0))(net, X),
    "vmap: different sizes": lambda net: tether.vmap(lambda a, b: a)(jnp.ones(3), jnp.ones(4)),
    "vmap: nothing mapped": lambda net: tether.vmap(lambda m: m)(net),
    "vmap: in_axes too long": lambda net: tether.vmap(lambda x: x, in_axes=(0, 0))(X),
    "vmap: scalar": lambda net: tether.vmap(lambda x: x)(1.0),
    "vmap: out_axes None": lambda net: tether.vmap(lambda x: x, out_axes=None)(X),
    "vmap: no such rule": lambda net: tether.vmap(lambda x: x, writes={"last": "avg"}),
    "vmap: no prefix": lambda net: tether.vmap(lambda x: x, in_axes=({"a": 0},))({"b": X}),
    "view without a setting": lambda net: [tether.view(net)],
    "view of no setting": lambda net: [tether.view(net, nothing=1)],
    "view of a cell": lambda net: [tether.view(net, nn.Linear, weight=jnp.ones((3, 2)))],
    "view training=2": lambda net: [tether.view(net, training=2)],
    "view of Variables": lambda net: [tether.view(net, tether.Param, training=False)],
    "view of no path": lambda net: [tether.view(net, "liner", training=False)],
    "freeze of no path": lambda net: [tether.freeze(net, "liner")],
    "cell of no path": lambda net: tether.cell(net, "linear.wieght"),
    "variables of no selection": lambda net: tether.variables(net, 3),
    "variables of no module": lambda net: tether.variables(3),
    "bind of no path": lambda net: tether.bind(net, {"linear.wieght": 1.0}),
    "bind of another shape": lambda net: tether.bind(net, {"linear.bias": jnp.ones(2)}),
    "bind of another module": lambda net: tether.bind(net, nn.Linear(2, 2)),
    "bind of no values": lambda net: tether.bind(net, 3),
    "update of another shape": lambda net: tether.update(net, {"count": 1, "linear.bias": jnp.ones(2)}),
    "replace of no path": lambda net: tether.replace(net, {"liner": nn.Linear(2, 3)}),
    "replace by an array": lambda net: tether.replace(net, {"linear.bias": jnp.ones(3)}),
    "replace of a cell by a module": lambda net: tether.replace(net, {"linear.bias": nn.Linear(2, 3)}),
    "lerp of different modules": lambda net: tether.lerp(net, nn.Linear(2, 3), 0.5),
    "lerp of different shapes": lambda net: tether.lerp(nn.LayerNorm(2), nn.LayerNorm(3), 0.5),
    "pure without a value": lambda net: tether.pure(net.linear)({"weight": jnp.ones((3, 2))}, X),
    "pure of no path": lambda net: tether.pure(net.linear)({"wieght": jnp.ones((3, 2))}, X),
    "jit of no function": lambda net: tether.jit(3),
    "no such reduction": lambda net: tether.State(0.0, reduce="avg"),
    "Param of no array": lambda net: tether.Param("abc"),
    "Rng of no key": lambda net: tether.Rng(jnp.ones(2)),
    "several keys for one": lambda net: nn.Linear(2, 2, key=jax.random.split(jax.random.key(0))),
    "deleted by a donated call": donated_copy,
    "place of no module": lambda net: tether.place((net, net), jax.devices()[0]),  # type: ignore[arg-type]
    "modules of no module": lambda net: tether.modules(3),  # type: ignore[arg-type]
}


ISSUE = """
write of another shape; write of a lossy kind; new attribute; replaced submodule; bare array; tie by value;
unhashable setting; per-lane write; smuggled Variable; lost gradient; wrong channel count; wrong rank;
one value per channel;
argnums out of range; gradient of an int; gradient of a model without floats; optimizer: gradient without a slot;
optimizer: gradient of another shape
"""
BAD_INPUT = [name.strip() for name in ISSUE.replace("\n", " ").split(";")]  # what must have all four rows
