# SPDX-License-Identifier: Apache-2.0
"""Statements of the small language that transform nothing, and blocks of statements.

Each takes x, a vector of two entries, and gives another one. Both machines take them alike.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

import tether
from tests.laws.infinitesimals import Number, stack
from tests.laws.machines import MEMBERS, Hand, Live, Models

WAYS = ("argument", "closure", "method", "self")  # to come by models
ARMED: list[bool] = []  # whether Fail raises

WEIGHTS = np.array([1.0, -0.5], np.float32)  # of the scalar that is differentiated

Fun = Callable[..., Any]


class Boom(Exception):
    pass


# What both sides mean by the same words.


def tanh(x: Any) -> Any:
    return x.tanh() if isinstance(x, Number) else jnp.tanh(x)


def rows_of(x: Any, factors: tuple[float, ...]) -> Any:
    rows = [factor * x for factor in factors]
    return stack(rows) if isinstance(x, Number) else jnp.stack(rows)


def fitted(x: Any, like: Any) -> Any:
    """x, as something to add to a value of another shape."""
    if like.shape in ((), (MEMBERS,)):
        x = x.mean()
    return x.broadcast(like.shape) if isinstance(x, Number) else jnp.broadcast_to(x, like.shape)


def squeezed(value: Any) -> Any:
    """A value, as something to add to x."""
    return value.mean(0) if value.shape[:1] == (MEMBERS,) else value


def product(matrix: Any, x: Any) -> Any:
    return (matrix * x).sum(1) if isinstance(matrix, Number) else matrix @ x


def scalar(y: Any) -> Any:
    return (y * WEIGHTS).sum()


def reach(way: str, fun: Fun, models: Models) -> tuple[Fun, tuple[Any, ...]]:
    """``fun(models, ...)`` by one of the ways to come by models, and its arguments before the others."""
    if way == "argument":
        return fun, (models,)
    if way == "closure":
        return lambda *args: fun(models, *args), ()
    if way == "method":
        return Holder(fun, models).run, ()
    others = {owner: model for owner, model in models.items() if owner != "m"}
    return functools.partial(models["m"].apply, fun, others), ()


class Holder:
    def __init__(self, fun: Fun, models: Models):
        self.fun, self.models = fun, models

    def run(self, *args: Any) -> Any:
        return self.fun(self.models, *args)


class Statement:
    def apply(self, machine: Any, x: Any) -> Any:
        raise NotImplementedError

    def build(self, models: Models | None) -> Fun:
        """The statement as a function of the models and x; the models, where they are known before the run."""
        return lambda models, x: self.apply(Live(models), x)

    def by_hand(self, hand: Hand, x: Number) -> Number:
        return self.apply(hand, x)


@dataclass(frozen=True)
class Read(Statement):
    name: str
    how: str  # "add", "product" or "tanh"

    def apply(self, machine: Any, x: Any) -> Any:
        value = squeezed(machine.get(self.name))
        if self.name.endswith("count"):
            value = 0.1 * value.astype(np.float32)
        if self.how == "add":
            return 0.5 * (x + value)
        return x * value if self.how == "product" else tanh(x + value)


@dataclass(frozen=True)
class Write(Statement):
    name: str
    how: str  # "affine", "product", "tanh" or "constant"
    back: bool = False  # whether it is read at once

    def apply(self, machine: Any, x: Any) -> Any:
        old = machine.get(self.name)
        if self.name.endswith("count"):
            new = old + 1
        elif self.how == "constant":
            new = 0.5 * old + 0.1
        elif self.how == "affine":
            new = 0.5 * old + 0.25 * fitted(x, old)
        else:
            new = old * fitted(x, old) if self.how == "product" else tanh(old + fitted(x, old))
        machine.set(self.name, new)
        return Read(self.name, "tanh").apply(machine, x) if self.back else x


@dataclass(frozen=True)
class Call(Statement):
    """A method that counts, writes and reads again; or a submodule."""

    owner: str
    name: str  # "step" or "inner"

    def apply(self, machine: Any, x: Any) -> Any:
        return getattr(machine, self.name)(self.owner, x)


@dataclass(frozen=True)
class Custom(Statement):
    """tanh(w * x) with a rule of its own, which is the true one; the write in it has no tangent."""

    owner: str
    kind: str  # "vjp" or "jvp"

    def apply(self, machine: Any, x: Any) -> Any:
        model = machine.models[self.owner]
        if self.kind == "jvp":
            fun = tether.custom_jvp(_saturated)
            fun.defjvp(_saturated_jvp)
        else:
            fun = tether.custom_vjp(_saturated)
            fun.defvjp(lambda model, x: (_saturated(model, x), (model, x)), _saturated_bwd)
        return fun(model, x)

    def by_hand(self, hand: Hand, x: Number) -> Number:
        hand.set(f"{self.owner}.count", hand.get(f"{self.owner}.count") + 1)
        h = hand.get(f"{self.owner}.h")
        hand.set(f"{self.owner}.h", (0.5 * h + 0.25 * x).stopped())
        return (hand.get(f"{self.owner}.w") * x).tanh()


def _saturated(model: Any, x: Any) -> Any:
    model.count = model.count + 1
    model.h = 0.5 * model.h + 0.25 * x
    return jnp.tanh(model.w * x)


def _saturated_jvp(primals: Any, tangents: Any) -> Any:
    (model, x), (model_dot, x_dot) = primals, tangents
    y, w_dot = _saturated(model, x), jnp.zeros(2) if model_dot.w is None else model_dot.w
    return y, (1.0 - y * y) * (w_dot * x + model.w * x_dot)


def _saturated_bwd(residuals: Any, g: Any) -> Any:
    model, x = residuals
    g = g * (1.0 - jnp.tanh(model.w * x) ** 2)
    return {"w": g * x}, g * model.w


@dataclass(frozen=True)
class Noise(Statement):
    owner: str

    def apply(self, machine: Any, x: Any) -> Any:
        return 0.5 * x + 0.1 * machine.noise(self.owner)


@dataclass(frozen=True)
class Fail(Statement):
    """Raises, while ARMED."""

    def apply(self, machine: Any, x: Any) -> Any:
        if ARMED:
            raise Boom
        return x


@dataclass(frozen=True)
class Block(Statement):
    statements: tuple[Statement, ...]

    def build(self, models: Models | None) -> Fun:
        funs = [statement.build(models) for statement in self.statements]

        def run(models: Models, x: Any) -> Any:
            for fun in funs:
                x = fun(models, x)
            return x

        return run

    def by_hand(self, hand: Hand, x: Number) -> Number:
        for statement in self.statements:
            x = statement.by_hand(hand, x)
        return x
