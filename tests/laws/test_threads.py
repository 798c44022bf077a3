# SPDX-License-Identifier: Apache-2.0
"""Threads that look at a model while another trains it see the state of a whole step, never of two."""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tether
from tests.laws.trees import examples
from tether import nn
from tether._core import frame

STEPS, LOOKS = examples(300), 30  # the trainer goes on until each thread has looked often enough
BUDGET, PATIENCE = examples(3), 60  # seconds: after which fewer steps do, and after which few looks are a fault


class Odometer(tether.Module):
    """Every cell holds the number of steps: a mixture of two steps shows."""

    def __init__(self) -> None:
        self.weight = tether.Param(jnp.zeros(3))
        self.parts = [tether.State(jnp.zeros(4)) for _ in range(32)]
        self.cache = tether.State({"a": jnp.zeros(2), "b": [jnp.zeros(())]})
        self.count = tether.State(0)

    def step(self) -> Any:
        self.parts = [part + 1 for part in self.parts]
        self.weight = self.weight + 1
        self.cache = jax.tree.map(lambda x: x + 1, self.cache)
        self.count = self.count + 1
        return self.count

    def span(self) -> Any:
        """The lowest and the highest number in any cell."""
        values = [jnp.ravel(x).astype(jnp.float32) for x in jax.tree.leaves(self)]
        return jnp.stack([jnp.concatenate(values).min(), jnp.concatenate(values).max()])


@pytest.fixture(autouse=True)
def _frequent_switches() -> Iterator[None]:
    """Threads take turns every 10 µs instead of every 5 ms: more of the moments at which they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


class Watchers:
    """Threads that look, each in a loop, while the main thread does something else.

    Args:
        looks: What each thread does in its loop; gives something that is recorded.
    """

    def __init__(self, *looks: Callable[[], Any]):
        self.seen: list[list[Any]] = [[] for _ in looks]
        self.faults: list[BaseException] = []
        self.done = threading.Event()
        self.threads = [threading.Thread(target=self._watch, args=pair) for pair in zip(looks, self.seen, strict=True)]

    def _watch(self, look: Callable[[], Any], seen: list[Any]) -> None:
        try:
            with jax.numpy_dtype_promotion("strict"):  # as in the main thread, which compiled it
                while not self.done.is_set():
                    seen.append(look())
        except BaseException as error:
            self.faults.append(error)

    def during(self, step: Callable[[], Any], steps: int = STEPS) -> int:
        """Takes steps until everybody has looked often enough; how many steps."""
        for thread in self.threads:
            thread.start()
        taken, start = 0, time.monotonic()
        try:
            while not self.faults and time.monotonic() < start + PATIENCE:
                if min(map(len, self.seen)) >= LOOKS and (taken >= steps or time.monotonic() > start + BUDGET):
                    break
                step()
                taken += 1
        finally:
            self.done.set()
            for thread in self.threads:
                thread.join()
        if self.faults:
            raise self.faults[0]
        assert min(map(len, self.seen)) >= LOOKS, "a thread hardly had a look: it starves"
        return taken


def read_span(model: Odometer) -> tuple[float, float]:
    values = np.concatenate([np.ravel(np.asarray(x)) for x in jax.tree.leaves(model)])
    return float(values.min()), float(values.max())


@pytest.mark.parametrize("donate", [False, True], ids=["keeping", "donating"])
@pytest.mark.parametrize("by", ["argument", "closure"])
def test_a_look_sees_a_whole_step(by: str, donate: bool):
    """Two threads take snapshots and two evaluate, while the main thread trains."""
    model = Odometer()
    if by == "argument":
        train, evaluate = tether.jit(lambda m: m.step(), donate_state=donate), tether.jit(lambda m: m.span())
        step, span = lambda: train(model), lambda: evaluate(model)
    else:
        step = train = tether.jit(model.step, donate_state=donate)
        span = evaluate = tether.jit(model.span)
    for look in (step, step, span, lambda: tether.snapshot(model)):
        look()
    snapshot = lambda: read_span(tether.snapshot(model))
    watchers = Watchers(snapshot, snapshot, *2 * [lambda: tuple(map(float, span()))])
    taken = watchers.during(step)
    for seen in watchers.seen:
        assert [pair for pair in seen if pair[0] != pair[1]] == [], "a mixture of two steps"
        numbers = [low for low, _ in seen]
        assert numbers == sorted(numbers), "an older step after a newer one"
        assert numbers[0] >= 2 and numbers[-1] <= taken + 2
    assert read_span(model) == (taken + 2, taken + 2), "a step was lost"
    assert (train.traces, evaluate.traces) == (1, 1)
    assert not frame.thread.frames


def test_two_modules_of_one_step_are_seen_together():
    """A snapshot of several modules is one look."""
    models = Odometer(), Odometer()
    train = tether.jit(lambda one, two: (one.step(), two.step()))
    step = lambda: train(*models)
    step()
    watchers = Watchers(*4 * [lambda: read_span(Both(*tether.snapshot(models)))])
    taken = watchers.during(step)
    for seen in watchers.seen:
        assert [pair for pair in seen if pair[0] != pair[1]] == []
    assert read_span(Both(*models)) == (taken + 1, taken + 1)


class Both(tether.Module):
    def __init__(self, *parts: tether.Module):
        self.parts = parts


def test_views_are_made_by_several_threads():
    """Each look makes its view anew; all of them share one program, and the modes stay apart."""

    class Net(tether.Module):
        def __init__(self) -> None:
            self.norm, self.drop = nn.BatchNorm(2), nn.Dropout(0.5)

        def __call__(self, x: Any) -> Any:
            return self.drop(self.norm(x))

    model, x = Net(), jnp.asarray([[1.0, -2.0], [3.0, 4.0]])
    run = tether.jit(lambda model, x: model(x))
    run(model, x)  # writes the statistics once
    expected = np.asarray(run(model.eval(), x)).tolist()
    watchers = Watchers(
        *2 * [lambda: run(model.eval(), x).tolist()],
        lambda: run(tether.view(model, "norm", training=False).eval(), x).tolist(),
    )
    frozen = tether.view(model, "norm", training=False)
    run(frozen.eval(), x)
    traces = run.traces
    watchers.during(lambda: run(frozen, x))  # drops, and leaves the statistics alone
    assert [seen for seen in watchers.seen if seen != [expected] * len(seen)] == []
    assert run.traces <= traces + 1


def test_one_function_trains_a_model_in_each_thread():
    """Donating: no thread takes another one's buffers."""
    train = tether.jit(lambda model: model.step(), donate_state=True)
    models = [Odometer() for _ in range(4)]
    train(models[0])
    train(models[0])
    counts = Counter({0: 2})

    def look(i: int) -> Callable[[], Any]:
        def step() -> float:
            counts[i] += 1
            return float(train(models[i]))

        return step

    watchers = Watchers(*map(look, range(1, 4)))
    watchers.during(look(0), steps=LOOKS)
    for i, model in enumerate(models):
        assert read_span(model) == (counts[i], counts[i])
    for i, seen in enumerate(watchers.seen, start=1):
        assert seen == [float(n) for n in range(1, counts[i] + 1)]
    assert train.traces == 1


def test_a_function_is_called_under_two_configurations():
    """A thread that reorders the programs hides none from the others."""
    cell: Any = tether.State(jnp.arange(2.0))
    f = tether.jit(lambda x: cell.value @ x)
    x = jnp.ones(2)

    def precise() -> float:
        with jax.default_matmul_precision("highest"):
            return float(f(x))

    plain = lambda: float(f(x))
    plain()
    precise()
    watchers = Watchers(plain, plain, precise)
    watchers.during(precise, steps=examples(1000))
    assert [set(seen) for seen in watchers.seen] == [{1.0}] * 3
    assert f.traces == 2


def test_random_scopes_belong_to_threads():
    """Each thread draws as it does when it is alone."""
    dropout, x = nn.Dropout(0.5), jnp.ones(16)
    run = tether.jit(lambda x: dropout(x))

    def draws(seed: int) -> list[list[float]]:
        with tether.random.scope(seed):
            return [run(x).tolist(), dropout(x).tolist(), run(x).tolist()]

    alone = [draws(seed) for seed in range(4)]
    watchers = Watchers(*[lambda seed=seed: draws(seed) for seed in range(3)])
    watchers.during(lambda: draws(3), steps=LOOKS)
    for seen, expected in zip(watchers.seen, alone, strict=False):
        assert [found for found in seen if found != expected] == []
    assert alone[0] != alone[1]


class Many(tether.Module):
    def __init__(self) -> None:
        self.parts = [tether.State(jnp.zeros(())) for _ in range(300)]
        self.tree = tether.State([jnp.zeros(())] * 300)


EAGER: dict[str, Callable[[Many, Any], Any]] = {
    "update": lambda model, n: tether.update(model, {f"parts[{i}]": n for i in range(300)}),
    "list": lambda model, n: setattr(model, "parts", [n] * 300),
    "tree": lambda model, n: setattr(model, "tree", [n] * 300),
}


@pytest.mark.parametrize("name", EAGER)
def test_a_write_of_many_cells_is_seen_whole(name: str):
    """Also outside transformations."""
    model, n = Many(), 0

    def step() -> None:
        nonlocal n
        n += 1
        EAGER[name](model, jnp.asarray(n, jnp.float32))

    step()
    cells = list(tether.variables(model, "tree*" if name == "tree" else "parts*").values())
    watchers = Watchers(*2 * [lambda: len(set(map(id, frame.gather(cells))))])
    watchers.during(step, steps=examples(100))
    assert [set(seen) for seen in watchers.seen] == [{1}, {1}], "a mixture of two writes"
