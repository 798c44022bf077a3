# SPDX-License-Identifier: Apache-2.0
"""A small language of stateful programs. Each statement has two meanings: what the library does, and the same by hand.

A program takes a vector ``x`` of two entries from statement to statement. It uses a model ``m``, which all share, and a
stack ``e`` of three; inside a vmap or a scan over the stack, one member ``k`` takes its place.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

import tether
from tests.laws.infinitesimals import Number, as_number, stack
from tests.laws.machines import MEMBERS, Hand, Models, UnclearError
from tests.laws.statements import Block, Fun, Statement, product, reach, rows_of, scalar, tanh

ROWS = (0.5, -1.0, 0.75)  # x times these is what is mapped or scanned over: three, as there are members
RUNS: list[str] = []  # one entry for each time that the Python of a jitted function ran


@dataclass(frozen=True)
class Transform(Statement):
    body: Block
    way: str

    def build(self, models: Models | None) -> Fun:
        body = self.body.build(models)
        return lambda models, x: self.live(*reach(self.way, body, models), x)

    def live(self, fun: Fun, lead: tuple[Any, ...], x: Any) -> Any:
        """The transformation of ``fun(*lead, x)``."""
        raise NotImplementedError

    def by_hand(self, hand: Hand, x: Number) -> Number:
        with hand.all_or_nothing():
            return self.hand(hand, x)

    def hand(self, hand: Hand, x: Number) -> Number:
        return self.body.by_hand(hand, x)


@dataclass(frozen=True)
class Jit(Transform):
    """One jitted function for all runs, but for those that close over a member of a stack."""

    def build(self, models: Models | None) -> Fun:
        body = self.body.build(models)

        def run(models: Models, x: Any) -> Any:
            RUNS.append("run")
            return body(models, x)

        if self.way == "argument":
            jitted = tether.jit(run)
            return lambda models, x: jitted(models, x)
        if models is not None:
            fun, _ = reach(self.way, run, models)
            closed = tether.jit(fun)
            return lambda _, x: closed(x)
        return lambda models, x: tether.jit(reach(self.way, body, models)[0])(x)


@dataclass(frozen=True)
class Checkpoint(Transform):
    def live(self, fun: Fun, lead: tuple[Any, ...], x: Any) -> Any:
        return tether.checkpoint(fun)(*lead, x)

    def hand(self, hand: Hand, x: Number) -> Number:
        with hand.staging():
            return self.body.by_hand(hand, x)


@dataclass(frozen=True)
class Grad(Transform):
    """By x."""

    with_value: bool

    def live(self, fun: Fun, lead: tuple[Any, ...], x: Any) -> Any:
        loss = lambda *args: scalar(fun(*args))
        if not self.with_value:
            return 0.5 * tanh(tether.grad(loss, argnums=len(lead))(*lead, x))
        value, gradient = tether.value_and_grad(loss, argnums=len(lead))(*lead, x)
        return 0.5 * tanh(gradient + value)

    def hand(self, hand: Hand, x: Number) -> Number:
        with hand.differentiating() as tag:
            value = scalar(self.body.by_hand(hand, x.seeded(tag)))
        gradient, value = value.jacobian(tag, x.shape), value.without(tag)
        return 0.5 * tanh(gradient + value if self.with_value else gradient)


@dataclass(frozen=True)
class Train(Statement):
    """A step of gradient descent on the Params of one owner."""

    body: Block
    way: str  # "argument", "wrt" or "cells"
    owner: str

    def build(self, models: Models | None) -> Fun:
        body = self.body.build(models)

        def run(models: Models, x: Any) -> Any:
            model = models[self.owner]
            if self.way == "argument":
                loss = lambda model, x: scalar(body({**models, self.owner: model}, x))
                grads = tether.grad(loss)(model, x)
            else:
                cells = [tether.cell(model, "w"), tether.cell(model, "c")]
                loss = lambda: scalar(body(models, x))
                value, grads = tether.value_and_grad(loss, wrt=model if self.way == "wrt" else cells)()
                x = 0.5 * (x + tanh(value))
            w, c = grads if self.way == "cells" else (grads.w, grads.c)
            model.w, model.c = model.w - 0.1 * w, model.c - 0.1 * c
            return x

        return run

    def by_hand(self, hand: Hand, x: Number) -> Number:
        names = f"{self.owner}.w", f"{self.owner}.c"
        with hand.all_or_nothing(), hand.differentiating(self.owner) as tag:
            value = scalar(self.body.by_hand(hand, x))
        for name in names:
            old = hand.get(name)
            hand.set(name, old - 0.1 * value.jacobian(tag, old.shape, name))
        return x if self.way == "argument" else 0.5 * (x + tanh(value.without(tag)))


@dataclass(frozen=True)
class Derivative(Transform):
    kind: str  # name of the transformation

    def live(self, fun: Fun, lead: tuple[Any, ...], x: Any) -> Any:
        if self.kind in ("jacfwd", "jacrev"):
            return 0.5 * tanh(getattr(tether, self.kind)(fun, argnums=len(lead))(*lead, x) @ x)
        if self.kind == "hessian":
            loss = lambda *args: scalar(fun(*args))
            return 0.5 * tanh(tether.hessian(loss, argnums=len(lead))(*lead, x) @ x)
        zeros, v = [dict.fromkeys(models) for models in lead], 0.5 * x
        if self.kind == "vjp":
            y, pull = tether.vjp(fun, *lead, x)
            tangent = pull(v)[-1]
        elif self.kind == "jvp":
            y, tangent = tether.jvp(fun, (*lead, x), (*zeros, v))
        else:
            y, push = tether.linearize(fun, *lead, x)
            tangent = push(*zeros, v)
        return 0.5 * (y + tanh(tangent))

    def hand(self, hand: Hand, x: Number) -> Number:
        with hand.differentiating() as tag, hand.differentiating() as other:
            seeded = x.seeded(tag).seeded(other) if self.kind == "hessian" else x.seeded(tag)
            y = self.body.by_hand(hand, seeded)
        if self.kind == "hessian":
            return 0.5 * tanh(product(scalar(y).jacobian(tag, x.shape).jacobian(other, x.shape), x))
        jacobian = y.jacobian(tag, x.shape)
        if self.kind in ("jacfwd", "jacrev"):
            return 0.5 * tanh(product(jacobian, x))
        v = 0.5 * x
        tangent = (jacobian * v.column()).sum(0) if self.kind == "vjp" else product(jacobian, v)
        return 0.5 * (y.without(tag) + tanh(tangent))


@dataclass(frozen=True)
class Vmap(Transform):
    """Lanes share the models."""

    def live(self, fun: Fun, lead: tuple[Any, ...], x: Any) -> Any:
        return tether.vmap(fun, in_axes=(*[None for _ in lead], 0))(*lead, rows_of(x, ROWS)).mean(0)

    def hand(self, hand: Hand, x: Number) -> Number:
        lane = lambda i, tag: self.body.by_hand(hand, (ROWS[i] * x).in_lanes(frozenset([tag])))
        return hand.lanes(len(ROWS), lane).mean(0)


@dataclass(frozen=True)
class Map(Transform):
    """One row after the other; or two together, and the last one alone."""

    batch: bool

    def live(self, fun: Fun, lead: tuple[Any, ...], x: Any) -> Any:
        fun = functools.partial(fun, *lead)
        return tether.map(fun, rows_of(x, ROWS), batch_size=2 if self.batch else None).mean(0)

    def hand(self, hand: Hand, x: Number) -> Number:
        def rows(*places: int) -> Number:
            row = lambda i, tag: self.body.by_hand(hand, (ROWS[places[i]] * x).in_lanes(frozenset([tag])))
            return hand.lanes(len(places), row)

        if not self.batch:
            _, ys = hand.loop([0, 1, 2], lambda i, carry: (carry, self.body.by_hand(hand, ROWS[i] * x)), as_number(0.0))
            return stack(ys).mean(0)
        with hand.private_streams():  # of the scan, and of the vmap after it
            _, (pair,) = hand.loop([0], lambda _, carry: (carry, rows(0, 1)), as_number(0.0))
            return stack([pair[0], pair[1], rows(2)[0]]).mean(0)


@dataclass(frozen=True)
class Ensemble(Transform):
    """One member of the stack in each lane."""

    def build(self, models: Models | None) -> Fun:
        body = self.body.build(None)

        def run(models: Models, x: Any) -> Any:
            fun = lambda models, k, x: body({"m": models["m"], "k": k}, x)
            fun, lead = reach(self.way, fun, {"m": models["m"]})
            axes = (*[None for _ in lead], 0, 0)
            return tether.vmap(fun, in_axes=axes)(*lead, models["e"], rows_of(x, ROWS)).mean(0)

        return run

    def hand(self, hand: Hand, x: Number) -> Number:
        lane = lambda i, tag: self.body.by_hand(hand, (ROWS[i] * x).in_lanes(frozenset([tag])))
        return hand.lanes(MEMBERS, lane, "e").mean(0)


@dataclass(frozen=True)
class Scan(Transform):
    reverse: bool

    def live(self, fun: Fun, lead: tuple[Any, ...], x: Any) -> Any:
        def turn(carry: Any, row: Any) -> Any:
            *lead, x = carry
            y = fun(*lead, 0.5 * (x + row))
            return (*lead, y), 0.5 * y

        (*_, last), ys = tether.scan(turn, (*lead, x), rows_of(x, ROWS), reverse=self.reverse)
        return 0.5 * (last + ys[0])

    def hand(self, hand: Hand, x: Number) -> Number:
        def turn(i: int, carry: Number) -> tuple[Number, Number]:
            y = self.body.by_hand(hand, 0.5 * (carry + ROWS[i] * x))
            return y, 0.5 * y

        turns = range(len(ROWS))[:: -1 if self.reverse else 1]
        last, ys = hand.loop(list(turns), turn, x)
        return 0.5 * (last + ys[-1 if self.reverse else 0])


@dataclass(frozen=True)
class Layers(Transform):
    """A scan over the stack."""

    reverse: bool

    def build(self, models: Models | None) -> Fun:
        body = self.body.build(None)

        def run(models: Models, x: Any) -> Any:
            fun = lambda models, k, x: body({"m": models["m"], "k": k}, x)
            fun, lead = reach(self.way, fun, {"m": models["m"]})

            def turn(carry: Any, layer: Any) -> Any:
                *lead, x = carry
                return (*lead, fun(*lead, layer, x)), x

            (*_, last), ys = tether.scan(turn, (*lead, x), models["e"], reverse=self.reverse)
            return 0.5 * (last + ys[1])

        return run

    def hand(self, hand: Hand, x: Number) -> Number:
        turn = lambda i, carry: (hand.member(i, lambda: self.body.by_hand(hand, carry)), carry)
        last, ys = hand.loop(list(range(MEMBERS)[:: -1 if self.reverse else 1]), turn, x, "e")
        return 0.5 * (last + ys[1])


@dataclass(frozen=True)
class Fori(Transform):
    count: int

    def live(self, fun: Fun, lead: tuple[Any, ...], x: Any) -> Any:
        def turn(i: Any, carry: Any) -> Any:
            *lead, x = carry
            return (*lead, fun(*lead, 0.9 * x + 0.1 * i.astype(np.float32)))

        return tether.fori_loop(0, self.count, turn, (*lead, x))[-1]

    def hand(self, hand: Hand, x: Number) -> Number:
        turn = lambda i, x: (self.body.by_hand(hand, 0.9 * x + 0.1 * i), None)
        return hand.loop(list(range(self.count)), turn, x)[0]


@dataclass(frozen=True)
class While(Transform):
    """The test may count, too."""

    count: int
    counts: bool

    def build(self, models: Models | None) -> Fun:
        body = self.body.build(models)

        def run(models: Models, x: Any) -> Any:
            fun, lead = reach(self.way, body, models)

            def go_on(carry: Any) -> Any:
                if self.counts:
                    models["m"].count = models["m"].count + 1
                return carry[0] < self.count

            def turn(carry: Any) -> Any:
                i, *lead, x = carry
                return (i + 1, *lead, fun(*lead, x))

            return tether.while_loop(go_on, turn, (0, *lead, x))[-1]

        return run

    def hand(self, hand: Hand, x: Number) -> Number:
        def turn(i: int, x: Number) -> tuple[Number, None]:
            if self.counts:
                hand.set("m.count", hand.get("m.count") + 1)
            return x if i == self.count else self.body.by_hand(hand, x), None

        # The test alone is one more turn: it counts, and the body is left out.
        return hand.loop(list(range(self.count + 1)), turn, x)[0]


@dataclass(frozen=True)
class Branches(Transform):
    """A switch by the count, or a cond by the count or by x."""

    others: tuple[Block, ...]
    by: str  # "count" or "x"

    def build(self, models: Models | None) -> Fun:
        bodies = [body.build(models) for body in (self.body, *self.others)]

        def run(models: Models, x: Any) -> Any:
            reached = [reach(self.way, body, models) for body in bodies]
            funs, lead = [fun for fun, _ in reached], reached[0][1]
            if len(funs) == 3:
                return tether.switch(models["m"].count % 3, funs, *lead, x)
            pred = x[0] > 0 if self.by == "x" else models["m"].count % 2 == 0
            return tether.cond(pred, *funs, *lead, x)

        return run

    def hand(self, hand: Hand, x: Number) -> Number:
        chooses = x if self.by == "x" else hand.get("m.count")
        if len(self.others) == 2:
            chooses = hand.get("m.count")
            taken = int(chooses.value) % 3
        elif self.by == "x":
            if abs(x.value[0]) < 1e-3:
                raise UnclearError
            taken = int(x.value[0] <= 0)
        else:
            taken = int(chooses.value) % 2
        funs = [functools.partial(body.by_hand, hand, x) for body in (self.body, *self.others)]
        return hand.branches(taken, chooses.lanes, funs)
