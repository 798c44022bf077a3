# SPDX-License-Identifier: Apache-2.0
"""Nothing is lost: an exception or KeyboardInterrupt leaves every Variable as before, and the next call works."""

from __future__ import annotations

import dis
import functools
import random
import sys
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tether
from tether import nn
from tether._core import frame, ref
from tether.random._streams import default_stream

X = np.asarray([[1.0, 2.0], [3.0, -1.0], [0.5, 0.25]], np.float32)


class Net(tether.Module):
    def __init__(self):
        self.linear = nn.Linear(2, 2, key=jax.random.key(0))
        self.norm = nn.BatchNorm(2)
        self.count = tether.State(0)
        self.drop = nn.Dropout(0.5)

    def __call__(self, x: Any) -> Any:
        self.count = self.count + 1
        return self.drop(self.norm(self.linear(x)))


def values(model: Any) -> list[Any]:
    """Every value that a call could have changed, after a check that nothing of the call is left behind."""
    thread = frame.thread
    assert (thread.frames, thread.training, thread.stream, thread.constructing) == ([], None, None, None)
    found = [variable._value for variable in tether.variables(model).values()]
    found.append(jax.random.key_data(default_stream.value))
    assert not any(isinstance(value, jax.core.Tracer) for value in found)
    return [np.asarray(value).tolist() for value in found]


TRANSFORMED: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "jit": tether.jit,
    "jit donating": lambda f: tether.jit(f, donate_state=True),
    "grad": tether.grad,
    "value_and_grad": tether.value_and_grad,
    "vmap": lambda f: tether.vmap(lambda x: f(X), in_axes=0),
    "checkpoint": tether.checkpoint,
    "eval_shape": lambda f: lambda x: tether.eval_shape(f, x),
    "uses": tether.uses,
    "grad of grad": lambda f: tether.grad(lambda x: tether.grad(f)(x).sum()),
    "jit of grad of checkpoint": lambda f: tether.jit(tether.grad(tether.checkpoint(f))),
    "vmap of jit": lambda f: tether.vmap(tether.jit(lambda x: f(X))),
    "jax.grad": jax.grad,
    "pure": lambda f: lambda x: tether.pure(f)(tether.pure(f).values(), x),
}


@pytest.mark.parametrize(
    ("name", "error"), [*((name, KeyboardInterrupt) for name in TRANSFORMED), ("jit", ValueError), ("grad", ValueError)]
)
def test_exception_inside(name: str, error: type[BaseException]):
    """CASES 20. The body writes State, draws, and raises, at the first call; then it doesn't raise."""
    model = Net()
    raises = [True]

    def f(x: Any) -> Any:
        out = jnp.sum(model(x) ** 2)
        if raises:
            raise error("boom")
        return out

    transformed = TRANSFORMED[name](f)
    x = jnp.asarray(X)
    if name != "jax.grad":  # a plain transformation writes at once: what ran before the exception has happened
        before = values(model)
        for _ in range(2):
            with pytest.raises(error, match="boom"):
                transformed(x)
            assert values(model) == before
    else:
        with pytest.raises(error, match="boom"):
            transformed(x)
        values(model)
    raises.clear()
    transformed(x)
    values(model)
    count = int(model.count)
    assert count == {"eval_shape": 0, "uses": 0, "pure": 0, "jax.grad": 2}.get(name, 1)
    model(x)
    assert int(model.count) == count + 1


def test_exception_in_a_later_trace_of_a_compiled_function():
    model = Net()

    def f(x: Any, flag: bool) -> Any:
        out = model(x)
        if flag:
            raise ValueError("boom")
        return out

    compiled = tether.jit(f)
    compiled(X, False)
    before = values(model)
    with pytest.raises(ValueError, match="boom"):
        compiled(X, True)
    assert values(model) == before
    compiled(X, False)
    assert int(model.count) == 2 and compiled.traces == 1


def test_exception_in_a_constructor_inside_a_trace():
    class Bad(tether.Module):
        def __init__(self, x: Any):
            self.part = nn.Linear(2, 2)
            raise ValueError("boom")

    model = Net()
    before = values(model)
    for transformed in (tether.jit, tether.grad, tether.checkpoint):
        with pytest.raises(ValueError, match="boom"):
            transformed(lambda x: Bad(model(x)))(jnp.asarray(X))
        assert values(model) == before
    assert Net().linear._tether.sealed


def test_error_at_run_time_of_the_program():
    """The compiled program itself fails; nothing is written, donating or not."""
    state = tether.State(0.0)
    fails = [True]

    def check(x: Any) -> Any:
        if fails:
            raise ValueError("boom")
        return np.float32(x)

    @tether.jit
    def f(x: Any) -> Any:
        state.value = state.value + 1
        return jax.pure_callback(check, jax.ShapeDtypeStruct((), jnp.float32), x) + state.value

    with pytest.raises(Exception, match="boom"):
        jax.block_until_ready(f(1.0))
    fails.clear()
    assert isinstance(state._value, jax.Array) and not frame.thread.frames


# KeyboardInterrupt anywhere in the library: a tracing tool raises it where CPython looks at signals (after a call, at
# the start of a function, at a jump back), at the n-th such place, so that the places are tried one at a time.

LOOKS_AT_SIGNALS = {"CALL", "CALL_KW", "CALL_FUNCTION_EX", "RESUME", "JUMP_BACKWARD"}


@functools.cache
def names(code: types.CodeType) -> dict[int, str]:
    return {step.offset: step.opname for step in dis.get_instructions(code)}


class Injector:
    """Raises KeyboardInterrupt at the n-th place in the library where a signal could."""

    FILES = ("/tether/",)

    def __init__(self, at: int):
        self.left, self.fired = at, False
        self.last: dict[types.FrameType, int] = {}

    def is_watched(self, code: types.CodeType) -> bool:
        return any(part in code.co_filename for part in self.FILES)

    def look(self, code_frame: types.FrameType, offset: int) -> None:
        """Before each instruction of the library."""
        before, self.last[code_frame] = self.last.get(code_frame), offset
        if not self.fired and before is not None and names(code_frame.f_code).get(before) in LOOKS_AT_SIGNALS:
            self.left -= 1
            if self.left < 0:
                self.fired = True
                raise KeyboardInterrupt

    def traced(self, code_frame: types.FrameType, event: str, arg: Any) -> Any:
        if not self.is_watched(code_frame.f_code):
            return None
        code_frame.f_trace_opcodes, code_frame.f_trace_lines = True, False
        if event == "opcode":
            self.look(code_frame, code_frame.f_lasti)
        return self.traced

    def monitored(self, code: types.CodeType, offset: int) -> Any:
        if not self.is_watched(code):
            return sys.monitoring.DISABLE
        self.look(sys._getframe(1), offset)
        return None

    def start(self, on: bool) -> None:
        if sys.version_info < (3, 12):
            sys.settrace(self.traced if on else None)
            return
        monitoring, tool = sys.monitoring, sys.monitoring.OPTIMIZER_ID
        if on:
            monitoring.use_tool_id(tool, "interrupts")
            monitoring.restart_events()  # of files that another test did not watch
        monitoring.register_callback(tool, monitoring.events.INSTRUCTION, self.monitored if on else None)
        monitoring.set_events(tool, monitoring.events.INSTRUCTION if on else 0)
        if not on:
            monitoring.free_tool_id(tool)

    def run(self, fun: Callable[[], Any]) -> bool:
        """Whether ``fun`` was interrupted."""
        self.start(True)
        try:
            fun()
        except KeyboardInterrupt:
            return True
        finally:
            self.start(False)
            self.last.clear()
        return False


def count_places(fun: Callable[[], Any]) -> int:
    counter = Injector(10**9)
    counter.run(fun)
    return 10**9 - counter.left


@pytest.mark.parametrize("donate", [False, True])
def test_interrupt_at_every_place_of_a_compiled_call(donate: bool):
    """A call that was compiled before: either nothing or everything of it has happened."""
    model = Net()
    compiled = tether.jit(model, donate_state=donate)
    step = lambda: compiled(X)
    step()
    step()
    places = count_places(step)
    assert places > 5
    for at in range(places + 2):
        before, count = values(model), int(model.count)
        Injector(at).run(step)
        after = values(model)
        assert int(model.count) in (count, count + 1)
        assert (after == before) is (int(model.count) == count), f"half a step, interrupted at place {at}"
    count = int(model.count)
    step()
    assert int(model.count) == count + 1


@pytest.mark.parametrize("name", ["jit", "grad", "vmap", "checkpoint"])
def test_interrupt_at_many_places_of_a_trace(name: str):
    """A first call, interrupted at places spread over all that the library executes in it."""
    model = Net()
    scale = lambda x: jnp.sum(model.norm(x) * jnp.asarray([[1.0, 2.0]]))

    def f(x: Any) -> Any:
        model.count = model.count + 1
        return scale(X if name == "vmap" else x)

    fresh = lambda: TRANSFORMED[name](f) if name != "vmap" else tether.vmap(f)
    step = lambda: fresh()(jnp.asarray(X))
    step()
    places = count_places(step)
    for at in sorted(random.Random(0).sample(range(places), min(places, 40))):
        before, count = values(model), int(model.count)
        interrupted = Injector(at).run(step)
        after = values(model)
        if after != before:
            assert int(model.count) == count + 1, f"half a step, interrupted at place {at}"
        assert interrupted or int(model.count) == count + 1
    count = int(model.count)
    step()
    assert int(model.count) == count + 1


def test_interrupt_anywhere_in_a_frame(monkeypatch: pytest.MonkeyPatch):
    """Also right after the push of the Frame, and where JAX changes the key of its caches."""
    monkeypatch.setattr(ref, "cached", [True])  # what is cached outside is not found inside
    monkeypatch.setattr(Injector, "FILES", ("/tether/", "/jax/_src/config.py"))
    state = tether.State(1.0)
    run = lambda: frame.Frame("test").run({}, lambda: state.value)
    traced: list[int] = []
    outside = jax.jit(lambda x: (traced.append(1), x)[1])
    outside(1.0)
    places = count_places(run)
    assert places > 20
    for at in range(places):
        assert Injector(at).run(run)
        assert frame.thread.frames == [], f"a Frame was left behind at place {at}"
        outside(1.0)
        assert len(traced) == 1, f"the key of the caches was left behind at place {at}"
