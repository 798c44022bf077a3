# SPDX-License-Identifier: Apache-2.0
"""One table: kinds of state x transformations x ways to come by a model x calls.

Every cell is called twice, fails once, is called again, and is called on a clone. Each time the value, the
state, the structure, the avals and the number of traces must be those of the oracle: the same model written
by hand as a function ``(state, x) -> (loss, state)`` of dicts, under JAX's own transformations, lanes and
members one by one in a Python loop.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tether
from tests.laws.columns import TRANSFORMS
from tests.laws.kinds import KINDS, LANES, LOG, OTHER, OTHERS, XS, Boom, Kind, Task, Values, X
from tether.errors import MissedReadWarning

ALL = "TETHER_FUZZ" in os.environ  # `make fuzz`: more of the table

# Ways to come by a model: (task) -> (function, arguments before x, rebind), rebind(other) -> the arguments.


def by_argument(task):
    return (lambda task, x: task.loss(x)), (task,), lambda other: (other,)


def by_closure(task):
    def rebind(other):
        nonlocal task
        task = other
        return ()

    return (lambda x: task.loss(x)), (), rebind


def by_bound_method(task):
    return task.loss, (), None


def by_self(task):
    class Trainer:
        def __init__(self, task):
            self.task = task

        def run(self, x):
            return self.task.loss(x)

    trainer = Trainer(task)
    return trainer.run, (), lambda other: (setattr(trainer, "task", other), ())[1]


def by_partial(task):
    return functools.partial(lambda task, x: task.loss(x), task), (), None


def by_global(task):
    scope = {"task": task}
    exec("def run(x):\n    return task.loss(x)", scope)
    return scope["run"], (), lambda other: (scope.update(task=other), ())[1]


def by_container(task):
    held = {"tasks": [task]}
    return (lambda x: held["tasks"][0].loss(x)), (), lambda other: (held.update(tasks=[other]), ())[1]


def by_missed_read(task):
    hidden = types.MappingProxyType({"task": task})  # discovery doesn't look inside
    return (lambda x: hidden["task"].loss(x)), (), None


WAYS = [by_argument, by_closure, by_bound_method, by_self, by_partial, by_global, by_container, by_missed_read]


def make_task(kind: Kind, lanes: str) -> tether.Module:
    if lanes == "members":
        return tether.stack([Task(kind.make(), 1.0 + i) for i in range(LANES)])
    return Task(kind.make("lanes" if lanes else None))


def state_of(task: tether.Module) -> Values:
    values = {path: variable.value for path, variable in tether.variables(task).items()}
    return {**values, "rng": stream_value()}


def stream_value() -> Any:
    return tether.pure(tether.random.draw).values()["tether.random.default"]


def oracle(kind: str, transform: str) -> tuple[list[Any], list[Values]]:
    """Results and states of four calls, one after the other; the first state is the one before them."""
    column = TRANSFORMS[transform]
    return _oracle(kind, column.oracle, column.lanes, column.turns)


@functools.cache
def _oracle(kind: str, compute: Callable[..., Any], lanes: str, turns: bool) -> tuple[list[Any], list[Values]]:
    tether.seed(0)
    states, results = [state_of(make_task(KINDS[kind], lanes))], []
    step = jax.jit(functools.partial(compute, KINDS[kind]))
    for _ in range(4):
        result, state = step(states[-1], XS if lanes or turns else X)
        results.append(result)
        states.append(state)
    return results, states


class Watch:
    """What must not change: the structure, the order of the leaves, their avals."""

    def __init__(self, task: tether.Module):
        self.task = task
        self.before = self._now()

    def _now(self) -> Any:
        leaves, treedef = jax.tree.flatten(self.task)
        assert all(isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer) for leaf in leaves)
        weak = [jax.typeof(leaf).weak_type for leaf in leaves if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)]
        assert not any(weak)
        return treedef, [(leaf.shape, leaf.dtype) for leaf in leaves], list(tether.variables(self.task))

    def check(self, state: Values) -> None:
        assert self._now() == self.before
        assert_close(state_of(self.task), state)


def assert_close(actual: Any, desired: Any) -> None:
    if isinstance(actual, tether.Module):
        actual = {path: v.value for path, v in tether.variables(actual).items() if v.value is not None}
    if isinstance(desired, dict):
        assert actual.keys() == desired.keys()
        for name in desired:
            assert_close(actual[name], desired[name])
    elif isinstance(desired, tuple):
        for a, d in zip(actual, desired, strict=True):
            assert_close(a, d)
    elif jnp.issubdtype(desired.dtype, jax.dtypes.prng_key):
        np.testing.assert_array_equal(jax.random.key_data(actual), jax.random.key_data(desired))
    else:
        assert (actual.shape, actual.dtype) == (desired.shape, desired.dtype)
        np.testing.assert_allclose(actual, desired, rtol=2e-4, atol=2e-5)


@contextlib.contextmanager
def runs(count: int) -> Iterator[None]:
    LOG[:] = ["go"]
    yield
    assert LOG[1:] == ["run"] * count


@contextlib.contextmanager
def missed_reads_are_fine() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MissedReadWarning)
        yield


def cells() -> Iterator[Any]:
    """Every way for jit; for the others, which look for nothing, the argument, and another way in turn, or three."""
    for (i, kind), (j, transform), way in itertools.product(enumerate(KINDS), enumerate(TRANSFORMS), WAYS):
        if TRANSFORMS[transform].lanes == "members" and way is not by_argument:
            continue  # a stacked model is mapped where it is an argument
        if way is by_missed_read and TRANSFORMS[transform].traced and " in " in transform:
            continue  # each level traces once more
        few = not ALL or TRANSFORMS[transform].few or " in " in transform
        turn = [WAYS[1 + (i + 3 * j + k) % 7] for k in range(0, 1 if few else 6, 2)]
        if transform != "jit" and way is not by_argument and way not in turn:
            continue
        yield pytest.param(kind, transform, way, id=f"{kind}-{transform}-{way.__name__}")


@pytest.mark.parametrize(("kind", "transform", "way"), list(cells()))
def test_cell(kind: str, transform: str, way: Callable[..., Any]) -> None:
    results, states = oracle(kind, transform)
    tether.seed(0)
    row, column = KINDS[kind], TRANSFORMS[transform]
    x, other = (XS, OTHERS) if column.lanes or column.turns else (X, OTHER)
    task = make_task(row, column.lanes)
    holder, watch = [task], Watch(task)
    watch.check(states[0])
    fun, args, rebind = way(task)
    is_missed = way is by_missed_read and transform != "grad in jit"  # there wrt= has the model
    first = 2 if (column.compiled or column.traced) and is_missed else column.runs
    later = 0 if column.compiled else first

    with missed_reads_are_fine():
        call = column.apply(fun, holder, way.__name__)
        with runs(first):
            assert_close(call(*args, x), results[0])
        watch.check(states[1])

        if not column.compiled:
            call = column.apply(fun, holder, way.__name__)  # a fresh one must not meet what the last one left
        with runs(later):
            assert_close(call(*args, x), results[1])
        watch.check(states[2])

        if transform != "eager":
            LOG[:] = ["fail"]
            with pytest.raises(Boom):
                call(*args, other)
            watch.check(states[2])
        with runs(later):
            assert_close(call(*args, x), results[2])
        watch.check(states[3])

        clone = tether.clone(task)
        copied = Watch(clone)
        copied.check(states[3])
        assert copied.before == watch.before
        holder[0] = clone
        if rebind is None:
            fun, args, _ = way(clone)
            call = column.apply(fun, holder, way.__name__)
        else:
            args = rebind(clone)
        with runs(first if rebind is None else later):
            assert_close(call(*args, x), results[3])
        copied.check(states[4])
        watch.check({**states[3], "rng": states[4]["rng"]})  # the original has not moved


@pytest.mark.parametrize(
    ("kind", "transform", "way"),
    [
        pytest.param(kind, transform, WAYS[0 if TRANSFORMS[transform].lanes == "members" else (i + j) % len(WAYS)])
        for i, kind in enumerate(KINDS)
        for j, transform in enumerate(TRANSFORMS)
        if (i + j) % (2 if ALL else 4) == 0
    ],
)
def test_nothing_leaks(kind: str, transform: str, way: Callable[..., Any]) -> None:
    """Ways and kinds in turn: JAX compiles everything anew while it looks for leaks."""
    results, states = oracle(kind, transform)
    tether.seed(0)
    row, column = KINDS[kind], TRANSFORMS[transform]
    task = make_task(row, column.lanes)
    watch = Watch(task)
    fun, args, _ = way(task)
    LOG[:] = ["go"]
    with missed_reads_are_fine(), jax.checking_leaks():
        for i in range(2):
            result = column.apply(fun, [task], way.__name__)(*args, XS if column.lanes or column.turns else X)
            assert_close(result, results[i])
            del result
        LOG[:] = ["fail"]
        if transform != "eager":
            with pytest.raises(Boom):
                column.apply(fun, [task], way.__name__)(*args, OTHERS if column.lanes or column.turns else OTHER)
    watch.check(states[2])
