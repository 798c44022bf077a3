# SPDX-License-Identifier: Apache-2.0
"""Each undocumented assumption of ``_core/trace.py``, held against the installed JAX and CPython."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import take_current_trace

from tether._core import trace


def seen_in(transformed: Callable[[Callable[[Any], Any]], Any], look: Callable[[Any], Any]) -> Any:
    """What ``look`` gives of a value inside a transformation."""
    found: list[Any] = []

    def body(x: Any) -> Any:
        found.append(look(x))
        return x

    transformed(body)
    return found[0]


def scan(body: Callable[[Any], Any]) -> Any:
    return jax.lax.scan(lambda carry, _: (body(carry), None), 1.0, None, length=2)


def cond(body: Callable[[Any], Any]) -> Any:
    return jax.lax.cond(True, body, lambda x: x, 1.0)


PLAIN = {
    "jit": lambda body: jax.jit(body)(1.0),
    "checkpoint": lambda body: jax.checkpoint(body)(1.0),
    "scan": scan,
    "cond": cond,
    "grad": lambda body: jax.grad(body)(1.0),
    "jvp": lambda body: jax.jvp(body, (1.0,), (1.0,)),
    "vmap": lambda body: jax.vmap(body)(jnp.ones(2)),
}
STAGED = {"jit", "checkpoint", "scan", "cond"}


def test_outside_all_traces_the_evaluating_trace_is_current():
    assert trace.current() is trace.EVALUATING
    assert not hasattr(trace.EVALUATING, "parent_trace") or trace.EVALUATING.parent_trace is None
    assert trace.chain(trace.EVALUATING) == []


def test_every_thread_has_the_same_evaluating_trace():
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(trace.current()))
    thread.start()
    thread.join()
    assert found == [trace.EVALUATING]


def test_looking_at_the_trace_leaves_it_current():
    before = trace.current()
    assert trace.current() is before
    with take_current_trace() as current:
        assert current is before
    assert float(jnp.sin(0.0) + 1) == 1.0


@pytest.mark.parametrize("name", PLAIN)
def test_a_transformation_has_a_trace_of_its_own(name: str):
    def look(x: Any) -> Any:
        return trace.current() is trace.EVALUATING, trace.owner(x) is trace.current(), trace.chain(trace.current())

    is_evaluating, owns, chain = seen_in(PLAIN[name], look)
    assert not is_evaluating
    assert owns
    assert len(chain) >= 1 and trace.EVALUATING not in chain
    assert trace.current() is trace.EVALUATING


@pytest.mark.parametrize("name", PLAIN)
def test_staging_traces_are_told_apart(name: str):
    assert seen_in(PLAIN[name], lambda _: trace.is_staged(trace.current())) is (name in STAGED)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("jit", ("jit",)),
        ("checkpoint", ("checkpoint",)),
        ("scan", ("scan",)),
        ("cond", ("cond",)),
        ("grad", ("grad",)),
        ("jvp", ("grad", "jvp")),
        ("vmap", ("vmap",)),
    ],
)
def test_transformations_are_named(name: str, words: tuple[str, ...]):
    found = seen_in(PLAIN[name], lambda _: trace.transform_name(trace.current()))
    assert found.startswith("jax.") and any(word in found for word in words), found


def test_nested_traces_form_a_chain_that_begins_innermost():
    found: list[Any] = []

    def inner(x: Any) -> Any:
        found.append((trace.current(), trace.chain(trace.current())))
        return x

    def outer(x: Any) -> Any:
        found.append((trace.current(), trace.chain(trace.current())))
        return jax.vmap(inner)(jnp.stack([x, x])).sum()

    jax.grad(outer)(1.0)
    (outer_trace, outer_chain), (inner_trace, inner_chain) = found
    assert outer_chain == [outer_trace]
    assert inner_chain == [inner_trace, outer_trace]
    assert trace.crossed(inner_trace, outer_trace) == [inner_trace]
    assert trace.crossed(inner_trace, trace.EVALUATING) == [inner_trace, outer_trace]
    assert trace.crossed(inner_trace, inner_trace) == []


def test_an_array_has_no_owner():
    assert trace.owner(jnp.ones(2)) is None
    assert trace.owner(1.0) is None


def test_stopped_takes_off_the_tangent_and_belongs_to_the_trace_below():
    def f(x: Any) -> Any:
        value = trace.stopped(x * 3)
        assert trace.owner(value) is not trace.current()
        assert not isinstance(value, jax.core.Tracer)
        return x * value

    assert float(jax.grad(f)(2.0)) == 6.0  # d(x * 6) / dx, the 6 being constant


def test_stopped_keeps_lanes():
    def f(x: Any) -> Any:
        assert trace.owner(trace.stopped(x)) is trace.current()
        return x

    jax.vmap(f)(jnp.ones(2))


@pytest.mark.parametrize("value", [jnp.arange(3), jnp.ones(2, bool), jax.random.key(0)])
def test_stopped_leaves_what_has_no_tangent(value: jax.Array):
    assert trace.stopped(value) is value


@pytest.mark.parametrize("name", PLAIN)
def test_a_key_made_inside_a_trace_can_belong_to_no_trace(name: str):
    """A draw inside a trace must be able to make the default stream's key outside it."""

    def look(_: Any) -> bool:
        with jax.ensure_compile_time_eval():
            key = jax.random.key(0)
        return trace.owner(key) is None and isinstance(key, jax.Array)

    assert seen_in(PLAIN[name], look)


def discarded() -> bool:
    return trace.result_is_discarded(1)


class TestDiscarded:
    """Whether a call is a statement, its result thrown away: read from the bytecode of the caller."""

    def test_statement(self):
        found: list[bool] = []

        def note() -> bool:
            found.append(trace.result_is_discarded(1))
            return True

        note()
        assert found == [True]

    def test_values_that_are_used(self):
        kept = discarded()
        listed = [discarded(), discarded()]
        called = bool(discarded())
        chained = discarded().__class__
        by_name = {"flag": discarded()}
        assert [kept, *listed, called, chained is bool, *by_name.values()] == [False, False, False, False, True, False]
        assert discarded() is False
        assert (lambda: discarded())() is False
        assert (discarded() or discarded()) is False

    def test_return_and_yield(self):
        def returns() -> bool:
            return discarded()

        def yields() -> Any:
            yield discarded()

        assert returns() is False
        assert list(yields()) == [False]

    def test_keywords_and_unpacked_arguments(self):
        found: list[bool] = []

        def note(*_: Any, **__: Any) -> int:
            found.append(trace.result_is_discarded(1))
            return 1

        note(1, a=2)
        note(*[1], a=2)
        kept = note(*[1], a=2)
        assert found == [True, True, False] and kept == 1

    def test_method_in_a_loop_and_in_a_with_block(self):
        found: list[bool] = []

        class Notes:
            def note(self) -> bool:
                found.append(trace.result_is_discarded(1))
                return False

        notes = Notes()
        for _ in range(2):
            notes.note()
        with jax.ensure_compile_time_eval():
            notes.note()
        while notes.note():
            pass
        assert found == [True, True, True, False]
