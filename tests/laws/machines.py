# SPDX-License-Identifier: Apache-2.0
"""The two machines that programs run on: Live, the library's Variables; and Hand, float64 NumPy.

By hand, loops are Python loops, lanes run one after the other, and derivatives are infinitesimals. Nothing there is
of the library but the rules that it promises: what a write in lanes means, which key a draw gives.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import tether
from tests.laws.infinitesimals import TAGS, Number, as_number, stack
from tether.errors import VmapWriteError

MEMBERS = 3
MEANS = ("h", "inner.seen")  # those with reduce="mean"
NAMES = ("w", "c", "h", "s", "count", "inner.seen", "rng")

Models = dict[str, Any]


class Inner(tether.Module):
    def __init__(self):
        self.w = tether.Param(jnp.zeros(2))
        self.seen = tether.State(jnp.array([0.1, -0.2]), reduce="mean")

    def __call__(self, x):
        self.seen = 0.5 * self.seen + 0.25 * x
        return jnp.tanh(self.w * x + self.seen)


class Model(tether.Module):
    def __init__(self, scale: float):
        self.w = tether.Param(scale * jnp.array([0.6, -0.4]))
        self.c = tether.Param(scale * 0.7)
        self.h = tether.State(jnp.array([0.2, -0.1]), reduce="mean")
        self.s = tether.State(0.3)
        self.count = tether.State(0)
        self.rng = tether.Rng(int(10 * scale))
        self.inner = Inner()
        self.inner.w = tether.cell(self, "w")

    def step(self, x):
        self.count = self.count + 1
        self.h = jnp.tanh(self.w * x + self.h)
        return self.h * self.c

    def apply(self, fun, others, *args):
        return fun({**others, "m": self}, *args)


def make_models() -> Models:
    return {"m": Model(1.0), "e": tether.stack([Model(0.5 + 0.25 * i) for i in range(MEMBERS)])}


class Live:
    """The models as statements see them."""

    def __init__(self, models: Models):
        self.models = models

    def _place(self, name: str) -> tuple[Any, str]:
        owner, *path, last = name.split(".")
        return functools.reduce(getattr, path, self.models[owner]), last

    def get(self, name: str) -> Any:
        return getattr(*self._place(name))

    def set(self, name: str, value: Any) -> None:
        setattr(*self._place(name), value)

    def step(self, owner: str, x: Any) -> Any:
        return self.models[owner].step(x)

    def inner(self, owner: str, x: Any) -> Any:
        return self.models[owner].inner(x)

    def noise(self, owner: str) -> Any:
        stream: Any = tether.cell(self.models[owner], "rng")
        return jax.random.uniform(tether.random.draw(stream), (2,))


class UnclearError(Exception):
    """What float32 and float64 may decide differently, or what no promise settles."""


class Stream:
    """A key, or a stack of them, by hand.

    Args:
        key: The key.
        lanes: The lanes that it depends on.
        touched: Whether it may have been drawn from since it began, as far as one can tell without looking at values.
    """

    def __init__(self, key: Any, lanes: frozenset[int] = frozenset(), touched: bool = False):
        self.key, self.lanes, self.touched = key, lanes, touched

    def halves(self) -> tuple[Stream, Stream]:
        """What the stream goes on as, and what it gives."""
        split = jax.random.split if not self.key.ndim else jax.vmap(jax.random.split, out_axes=1)
        after, drawn = split(self.key)
        return Stream(after, self.lanes, True), Stream(drawn, self.lanes)

    def folded(self, lane: int, tag: int) -> Stream:
        fold = jax.random.fold_in if not self.key.ndim else jax.vmap(jax.random.fold_in, (0, None))
        return Stream(fold(self.key, lane), self.lanes | {tag})

    def moved(self, start: Stream, before: Stream, after: Stream) -> Stream:
        """What the stream outside is, when this is the end of its private child."""
        same = jax.random.key_data(self.key) == jax.random.key_data(start.key)
        key = jnp.where(same.all(-1), before.key, after.key)
        return Stream(key, self.lanes | before.lanes, self.touched or before.touched)

    def __getitem__(self, index: int) -> Stream:
        return Stream(self.key[index], self.lanes, self.touched)

    def in_lanes(self, lanes: frozenset[int]) -> Stream:
        return Stream(self.key, self.lanes | lanes, self.touched)

    def like(self, others: list[Any]) -> Stream:
        """The stream, touched if another one is."""
        return Stream(self.key, self.lanes, any(other.touched for other in (self, *others)))


class Hand:
    """The state of a run by hand: the value of each Variable, and what may be done with all of them.

    Args:
        models: Whose values it begins with.
        eager: Whether loops and branches are Python's, so that what isn't taken isn't traced either.
        draws: Whether anything is drawn at all; else streams are left in peace.

    Attributes:
        strict: Whether a write without a rule raises that depends on the lane, but has the same value in all.
        lenient: Whether it is left open if a stream advances that a lane may have drawn from, and none has.
    """

    def __init__(self, models: Models, eager: bool, draws: bool):
        self.strict, self.lenient, self.may_raise, self._in_lanes = False, True, False, False
        self._eager, self._staged, self._draws = eager, not eager, draws
        self.state: dict[str, Any] = {}
        for owner in models:
            for name in NAMES:
                value = Live(models).get(f"{owner}.{name}")
                is_key = jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
                self.state[f"{owner}.{name}"] = Stream(value) if is_key else as_number(np.asarray(value))

    def get(self, name: str) -> Any:
        return self.state[name]

    def set(self, name: str, value: Any) -> None:
        assert value.shape == self.state[name].shape
        self.state[name] = value

    def step(self, owner: str, x: Number) -> Number:
        s = self.state
        s[f"{owner}.count"] = s[f"{owner}.count"] + 1
        s[f"{owner}.h"] = (s[f"{owner}.w"] * x + s[f"{owner}.h"]).tanh()
        return s[f"{owner}.h"] * s[f"{owner}.c"]

    def inner(self, owner: str, x: Number) -> Number:
        seen = self.state[f"{owner}.inner.seen"] = 0.5 * self.state[f"{owner}.inner.seen"] + 0.25 * x
        return (self.state[f"{owner}.w"] * x + seen).tanh()

    def noise(self, owner: str) -> Number:
        self.state[f"{owner}.rng"], drawn = self.state[f"{owner}.rng"].halves()
        return as_number(np.asarray(jax.random.uniform(drawn.key, (2,)))).in_lanes(drawn.lanes)

    @contextlib.contextmanager
    def all_or_nothing(self) -> Iterator[None]:
        before = dict(self.state)
        try:
            yield
        except BaseException:
            self.state = before
            raise

    @contextlib.contextmanager
    def differentiating(self, owner: str | None = None) -> Iterator[int]:
        """A tag whose tangents end with the block; for the Params of an owner they begin here."""
        tag, seeded = next(TAGS), {}
        for name in (f"{owner}.w", f"{owner}.c") if owner else ():
            seeded[name] = self.state[name], self.state[name].seeded(tag, name)
            self.state[name] = seeded[name][1]
        yield tag
        for name, value in self.state.items():
            if name in seeded and value is seeded[name][1]:
                self.state[name] = seeded[name][0]
            elif isinstance(value, Number) and value.has(tag):
                self.state[name] = value.without(tag)

    @contextlib.contextmanager
    def private_streams(self, but: str = "") -> Iterator[None]:
        """Streams begin as children, whatever is drawn from them advances the outer ones once. ``but`` is an owner."""
        before = {name: value for name, value in self.state.items() if isinstance(value, Stream) and self._draws}
        before.pop(f"{but}.rng", None)
        halves = {name: stream.halves() for name, stream in before.items()}
        self.state.update((name, start) for name, (_, start) in halves.items())
        yield
        for name, (after, start) in halves.items():
            end = self.state[name]
            self.state[name] = before[name] if end is start else end.moved(start, before[name], after)

    @contextlib.contextmanager
    def staging(self) -> Iterator[None]:
        """A trace that knows no values, even where nothing is compiled."""
        around, self._staged = self._staged, True
        try:
            yield
        finally:
            self._staged = around

    def lanes(self, count: int, fun: Callable[[int, int], Number], owner: str = "") -> Number:
        """``fun(lane, tag)`` for each lane; of the owner, if any, each lane has its own member."""
        tag, around, before = next(TAGS), self._in_lanes, self.state
        starts, ends, ys = [], [], []
        self._in_lanes = True
        try:
            for lane in range(count):
                starts.append(dict(self._lane(before, lane, tag, owner)))
                self.state = dict(starts[lane])
                ys.append(fun(lane, tag))
                ends.append(self.state)
        finally:
            self._in_lanes, self.state = around, before
        joined = {name: self._joined(name, before, starts, ends, tag, owner) for name in before}
        self.state.update(joined)
        return stack(ys).out_of(tag)

    def _lane(self, before: dict[str, Any], lane: int, tag: int, owner: str) -> Iterator[tuple[str, Any]]:
        for name, value in before.items():
            if owner and name.startswith(f"{owner}."):
                yield f"k.{name[2:]}", value[lane].in_lanes(frozenset([tag]))
            else:
                is_private = isinstance(value, Stream) and self._draws
                yield name, value.halves()[1].folded(lane, tag) if is_private else value

    def _joined(self, name: str, before: Any, starts: Any, ends: Any, tag: int, owner: str) -> Any:
        old = before[name]
        if owner and name.startswith(f"{owner}."):
            return stack_any([end[f"k.{name[2:]}"] for end in ends], tag)
        pairs = [(start[name], end[name]) for start, end in zip(starts, ends, strict=True)]
        if all(end is start for start, end in pairs):
            return old
        if isinstance(old, Stream):
            after = old.halves()[0]
            moved = [end.moved(start, old, after) for start, end in pairs]
            drawn = [jax.random.key_data(one.key) != jax.random.key_data(old.key) for one in moved]
            drawn = np.any(drawn, (0, -1))
            if self.lenient and not drawn.all() and any(end.touched for _, end in pairs):
                raise UnclearError
            return Stream(jnp.where(drawn, after.key, old.key), old.lanes, True)
        values = [end for _, end in pairs]
        same = all(values[0].is_same(value) for value in values)
        if not any(tag in value.lanes for value in values):
            assert same, f"{name} differs from lane to lane, and depends on none"
            return values[0]
        if name[2:] not in MEANS:
            if not same or self.strict:
                raise VmapWriteError("a write differs from lane to lane")
            self.may_raise = True
        return stack(values).mean(0).out_of(tag)

    def member(self, place: int, fun: Callable[[], Any]) -> Any:
        """``fun()`` with one member of the stack, whose values go back to their row."""
        rows = {name: value for name, value in self.state.items() if name.startswith("e.")}
        self.state = {name: value for name, value in self.state.items() if name not in rows}
        self.state.update((f"k{name[1:]}", value[place]) for name, value in rows.items())
        out = fun()
        for name, value in rows.items():
            parts = [value[i] for i in range(MEMBERS)]
            parts[place] = self.state.pop(f"k{name[1:]}")
            self.state[name] = stack_any(parts)
        return out

    def loop(
        self, turns: list[Any], turn: Callable[[Any, Number], tuple[Number, Any]], x: Number, sliced: str = ""
    ) -> Any:
        """The carry at the end, and what the turns gave. The owner that is sliced has a stream for each turn."""
        with self.private_streams(sliced):
            ys = []
            if self._eager and self._in_lanes and sliced:  # its rows are written back, drawn from or not
                self.state[f"{sliced}.rng"] = self.state[f"{sliced}.rng"].like([Stream(None, touched=True)])
            for i in turns:
                x, y = turn(i, x)
                ys.append(y)
            # Traced whether it turns or not; what depends on lanes goes round.
            if not self._eager and (not turns or self._in_lanes):
                x = self._settled(lambda x: turn(0, x)[0], x)
        return x, ys

    def _settled(self, turn: Callable[[Number], Number], x: Number) -> Number:
        end = dict(self.state)
        for _ in range(len(end)):
            self.state, start = dict(end), (x.lanes, *(value.lanes for value in end.values()))
            x = x.in_lanes(turn(x).lanes)
            end = {name: value.in_lanes(self.state[name].lanes).like([self.state[name]]) for name, value in end.items()}
            if start == (x.lanes, *(value.lanes for value in end.values())):
                break
        self.state = end
        return x

    def branches(self, taken: int, lanes: frozenset[int], funs: list[Callable[[], Number]]) -> Number:
        """All are run, where all are traced; one counts. ``lanes`` are those that the choice depends on."""
        if not self._staged and not lanes:
            with self.private_streams():
                return funs[taken]()
        with self.private_streams(), self.staging():
            before, outs = self.state, []
            for fun in funs:
                self.state = dict(before)
                outs.append((fun(), self.state))
            y, end = outs[taken]
            for name, value in end.items():
                others = [state[name] for _, state in outs]
                if any(other is not before[name] for other in others):
                    end[name] = value.in_lanes(lanes.union(*(other.lanes for other in others))).like(others)
            self.state = end
        return y.in_lanes(lanes.union(*(other.lanes for other, _ in outs)))


def stack_any(values: list[Any], tag: int = -1) -> Any:
    if isinstance(values[0], Stream):
        lanes = frozenset().union(*(value.lanes for value in values))
        return Stream(jnp.stack([value.key for value in values]), lanes - {tag}).like(values)
    return stack(values).out_of(tag)
