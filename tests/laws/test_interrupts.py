# SPDX-License-Identifier: Apache-2.0
"""KeyboardInterrupt at random points of a training loop: the state is that before or after a step; training goes on.

Three means, which come at different places: a signal (between bytecodes, and out of C calls that look at signals), an
exception set by another thread, and one raised by a profiler at a call or return, of Python or C. What runs between two
interrupts is repeated by plain JAX from the state before; tests/errors/test_interrupts.py tries the places of one call
one at a time.
"""

from __future__ import annotations

import ctypes
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend.core import get_opaque_trace_state, set_current_trace

import tether
from tests.laws.trees import examples
from tether import nn
from tether._core import frame, trace
from tether.random._streams import default_stream

# A callback of JAX, for the garbage collector say, may swallow an interrupt: Python then says so, and the loop goes on.
pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs interval timers"),
]

RATE, MOMENTUM, DECAY, EPS = 0.05, 0.9, 0.9, 1e-5
X = np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32)
Y = np.random.default_rng(1).normal(size=(6, 2)).astype(np.float32)


class Net(tether.Module):
    """Its input is scaled by the number of the step, so that every step moves every cell."""

    def __init__(self) -> None:
        self.linear = nn.Linear(3, 2, use_bias=False, key=jax.random.key(0))
        self.norm, self.drop = nn.BatchNorm(2, decay=DECAY), nn.Dropout(0.5)
        self.count = tether.State(0)

    def __call__(self, x: Any) -> Any:
        if self.training:
            self.count = self.count + 1
        return self.drop(self.norm(self.linear(x * (1 + self.count % 3).astype(x.dtype))))


def loss(model: Net) -> Any:
    return jnp.mean((model(jnp.asarray(X)) - Y) ** 2)


def train(model: Net, optimizer: tether.Optimizer) -> Any:
    value, gradient = tether.value_and_grad(loss)(model)
    optimizer.update(gradient)
    return value


def variables(model: Net, optimizer: tether.Optimizer) -> dict[str, Any]:
    """All that a step changes."""
    found = tether.variables(model)
    slots = [v for path, v in tether.variables(optimizer).items() if "trace" in path]
    names = sorted(path for path, v in found.items() if isinstance(v, tether.Param))  # optax's order, that of a dict
    return {**found, **dict(zip([f"trace of {name}" for name in names], slots, strict=True)), "rng": default_stream}


@jax.jit
def by_hand(state: dict[str, Any]) -> dict[str, Any]:
    """One step of the loop in plain JAX."""
    count, (key, drawn) = state["count"] + 1, jax.random.split(state["rng"])
    kept = jax.random.bernoulli(drawn, 0.5, (6, 2))

    def loss(params: dict[str, Any]) -> Any:
        h = X * (1 + count % 3).astype(jnp.float32) @ params["linear.weight"].T
        mean, var = h.mean(0), h.var(0)
        y = (h - mean[None]) / jnp.sqrt(var + EPS)[None] * params["norm.weight"][None] + params["norm.bias"][None]
        return jnp.mean((jnp.where(kept, y / 0.5, 0.0) - Y) ** 2), (mean, var)

    names = ["linear.weight", "norm.bias", "norm.weight"]
    gradient, statistics = jax.grad(loss, has_aux=True)({name: state[name] for name in names})
    new = {**state, "count": count, "rng": key}
    for name in names:
        new[f"trace of {name}"] = gradient[name] + MOMENTUM * state[f"trace of {name}"]
        new[name] = state[name] - RATE * new[f"trace of {name}"]
    for name, value in zip(("norm.mean", "norm.var"), statistics, strict=True):
        new[name] = DECAY * state[name] + (1 - DECAY) * value
    return new


def checked_state(cells: dict[str, Any]) -> dict[str, Any]:
    """The values, after a check that nothing of an interrupted call is left behind."""
    thread = frame.thread
    assert (thread.frames, thread.training, thread.stream, thread.constructing) == ([], None, None, None)
    values = {name: variable._value for name, variable in cells.items()}
    assert not any(isinstance(value, jax.core.Tracer) for value in values.values())
    dead = [name for name, value in values.items() if value.is_deleted()]
    assert not dead, f"dead buffers: {dead}"
    copies = {name: np.asarray(value).copy() for name, value in values.items()}
    return {**copies, "rng": jax.random.wrap_key_data(jnp.asarray(copies["rng"]))}  # a slot holds the data of a key


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, value in found.items():
        one, two = (jax.random.key_data(x) if name == "rng" else x for x in (value, expected[name]))
        np.testing.assert_allclose(one, two, rtol=2e-4, atol=1e-5, err_msg=name)


def mend_jax() -> None:
    """An interrupt in JAX's own bookkeeping, of an eager operation say, leaves a thread without a trace to run in."""
    try:
        whole = get_opaque_trace_state()._trace_ref() is trace.EVALUATING
    except AssertionError:
        whole = False
    if not whole:
        set_current_trace(trace.EVALUATING).__enter__()


class Interrupter:
    """Runs a loop until a KeyboardInterrupt that it brings about within ``within`` seconds.

    The loop asks ``fired`` at every turn, for an interrupt that something swallowed.
    """

    def __init__(self, means: str, within: float, seed: int = 0):
        self.means, self.within, self.chance = means, within, random.Random(seed)
        self.fired, self.caught = True, 0
        self.main = threading.get_ident()

    def run(self, loop: Callable[[], None]) -> None:
        self.fired = False
        self.catch(lambda: getattr(self, f"by_{self.means}")(loop))
        assert self.fired

    def catch(self, interrupted: Callable[[], None]) -> None:
        try:
            interrupted()
        except KeyboardInterrupt:
            self.caught += 1
        except Exception:  # JAX turns an interrupt in a comparison of cache keys into a ValueError
            if "KeyboardInterrupt" not in traceback.format_exc():
                raise
            self.caught += 1
        mend_jax()

    def by_signal(self, loop: Callable[[], None]) -> None:
        signal.setitimer(signal.ITIMER_REAL, self.chance.uniform(1e-5, self.within))
        loop()

    def handle(self, *_: Any) -> None:
        if not self.fired:
            self.fired = True
            raise KeyboardInterrupt

    def by_thread(self, loop: Callable[[], None]) -> None:
        end = time.perf_counter() + self.chance.uniform(0, self.within)

        def fire() -> None:
            while time.perf_counter() < end:
                time.sleep(0)
            self.fired = True
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.main), ctypes.py_object(KeyboardInterrupt))

        thread = threading.Thread(target=fire)
        thread.start()
        try:
            loop()
            thread.join()
            for _ in range(1000):  # where it comes if it came too late for the loop
                pass
        finally:
            thread.join()

    def by_profiler(self, loop: Callable[[], None]) -> None:
        self.after(self.chance.randrange(600), loop)

    def after(self, left: int, loop: Callable[[], None]) -> None:
        """By the profiler, after so many calls and returns."""

        def profile(*_: Any) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                sys.setprofile(None)
                self.fired = True
                raise KeyboardInterrupt

        sys.setprofile(profile)
        loop()
        sys.setprofile(None)


@pytest.fixture
def interrupter() -> Iterator[Callable[..., Interrupter]]:
    assert threading.current_thread() is threading.main_thread()
    made: list[Interrupter] = []

    def make(means: str, within: float) -> Interrupter:
        made.append(Interrupter(means, within))
        signal.signal(signal.SIGALRM, made[0].handle)
        return made[0]

    old = signal.getsignal(signal.SIGALRM)
    yield make
    signal.setitimer(signal.ITIMER_REAL, 0)
    sys.setprofile(None)
    signal.signal(signal.SIGALRM, old)


def seconds(turn: Callable[[], Any]) -> float:
    start = time.perf_counter()
    for _ in range(20):
        turn()
    return (time.perf_counter() - start) / 20


@pytest.mark.parametrize("donate", [False, True], ids=["keeping", "donating"])
@pytest.mark.parametrize(("means", "times"), [("signal", 1000), ("thread", 300), ("profiler", 300)])
def test_training_loop(interrupter: Any, means: str, times: int, donate: bool):
    """Steps, evaluations and snapshots, interrupted a thousand times."""
    model = Net()
    optimizer = tether.Optimizer(model, optax.sgd(RATE, momentum=MOMENTUM))
    step, evaluate = tether.jit(train, donate_state=donate), tether.jit(lambda model: model(jnp.asarray(X)))
    cells = variables(model, optimizer)
    turns = [
        *4 * [lambda: float(step(model, optimizer))],
        lambda: evaluate(model.eval()).block_until_ready(),
        lambda: tether.snapshot((model, optimizer)),
    ]
    for turn in 3 * turns:
        turn()
    where = interrupter(means, within=3 * seconds(turns[0]))

    def loop() -> None:
        while not where.fired:
            where.chance.choice(turns)()

    before = checked_state(cells)
    for _ in range(examples(times)):
        where.run(loop)
        after = checked_state(cells)
        expected = before
        for _ in range(int(after["count"]) - int(before["count"])):
            expected = by_hand(expected)
        assert_same(after, expected)
        before = after
    assert where.caught >= 0.9 * examples(times)
    step(model, optimizer)
    assert_same(checked_state(cells), by_hand(before))
    assert (step.traces, evaluate.traces) == (1, 1)


class Odometer(tether.Module):
    def __init__(self) -> None:
        self.parts = [tether.State(jnp.zeros(2)) for _ in range(4)]

    def step(self, x: Any) -> Any:
        gradient = tether.grad(lambda x: jnp.sum(x * self.parts[0]))(x)
        self.parts = [part + 1 for part in self.parts]
        return gradient

    def number(self) -> float:
        assert not any(v._value.is_deleted() for v in tether.variables(self).values())
        found = {float(part[0]) for part in self.parts}
        assert len(found) == 1, f"half a step: {found}"
        return found.pop()


@pytest.mark.parametrize("donate", [False, True], ids=["keeping", "donating"])
def test_first_steps(interrupter: Any, donate: bool):
    """In the trace, the compilation and the first calls of a function."""
    model, x = Odometer(), jnp.ones(2)
    fresh = lambda: tether.jit(model.step, donate_state=donate)
    fresh()(x)
    outside = trace._keys.value
    start = time.perf_counter()
    fresh()(x)
    where = interrupter("signal", within=1.2 * (time.perf_counter() - start))
    for _ in range(examples(30)):
        step = fresh()

        def loop(step: Any = step) -> None:
            while not where.fired:
                step(x)

        where.run(loop)
        number = model.number()
        try:
            step(x)
        except (
            RecursionError
        ):  # JAX (0.10) takes the interrupted call for one that is still running: once in a thousand
            fresh()(x)
        assert model.number() == number + 1
        assert step.traces <= 2
        # One of JAX's own contexts, the mesh, is left behind by JAX once in a thousand.
        assert trace._keys.value is outside, "the key of a Frame was left behind, and JAX finds none of its programs"


def test_arguments_of_another_make(interrupter: Any):
    """The first call with a JAX array, after those with NumPy's: jax.jit goes another way, through Python."""
    where, x = interrupter("profiler", 0), jnp.ones(2)

    def prepared() -> tuple[Odometer, Any]:
        model = Odometer()
        step = tether.jit(model.step, donate_state=True)
        for _ in range(3):
            step(np.ones(2, np.float32))
        return model, step

    _, step = prepared()
    places = [0]
    sys.setprofile(lambda *_: places.append(0))
    step(x)
    sys.setprofile(None)
    for at in where.chance.sample(range(len(places) // 2, len(places)), examples(20)):
        model, step = prepared()
        where.catch(lambda at=at, step=step: where.after(at, lambda: step(x)))
        number = model.number()
        assert number in (3, 4)
        step(x)
        assert model.number() == number + 1


def test_eager_updates(interrupter: Any):
    """Optimizer.update by itself: parameters and slots move together, by hand p_n = p_0 - n (n + 1) / 2, slot_n = n."""

    class Weights(tether.Module):
        def __init__(self) -> None:
            self.parts = [tether.Param(jnp.zeros(2)) for _ in range(4)]

    model = Weights()
    optimizer = tether.Optimizer(model, optax.sgd(1.0, momentum=1.0))
    ones = {path: jnp.ones(2) for path in tether.variables(model)}
    turn = lambda: optimizer.update(ones)
    where = interrupter("signal", within=2 * seconds(turn))

    def loop() -> None:
        while not where.fired:
            turn()

    for _ in range(examples(100)):
        for module in (model, optimizer):
            tether.update(module, jax.tree.map(jnp.zeros_like, module))
        where.run(loop)
        slots = {float(v.value[0]) for v in tether.variables(optimizer).values()}
        assert len(slots) == 1
        n = slots.pop()
        assert [float(part[0]) for part in model.parts] == [-n * (n + 1) / 2] * 4
    assert where.caught >= examples(90)
