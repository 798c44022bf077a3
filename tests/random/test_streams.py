# SPDX-License-Identifier: Apache-2.0
"""Streams: one advance a draw, the same in every transformation; the oracle is jax.random.split by hand."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tether
from tether.random import draw
from tether.random._streams import current_stream, default_stream


def data(key: jax.Array) -> list[Any]:
    return np.asarray(jax.random.key_data(key)).tolist()


def by_hand(start: jax.Array, count: int) -> tuple[list[Any], list[Any]]:
    """The keys of ``count`` draws, and the stream's key after them."""
    drawn = []
    for _ in range(count):
        start, one = jax.random.split(start)
        drawn.append(data(one))
    return drawn, data(start)


def test_draws_of_the_default_stream():
    tether.seed(7)
    keys, after = by_hand(jax.random.key(7), 3)
    assert [data(draw()) for _ in range(3)] == keys
    assert data(default_stream.value) == after


def test_draw_of_a_stream():
    rng = tether.Rng(3)
    keys, after = by_hand(jax.random.key(3), 2)
    before = data(default_stream.value) if default_stream._value is not None else None
    assert [data(draw(rng)) for _ in range(2)] == keys
    assert data(rng.value) == after
    assert before is None or data(default_stream.value) == before


def test_jit_draws_what_eager_draws():
    """CASES 4: three different values, equal to three calls without jit."""
    f = lambda: jax.random.uniform(draw())
    tether.seed(1)
    eager = [float(f()) for _ in range(3)]
    tether.seed(1)
    compiled = tether.jit(f)
    assert [float(compiled()) for _ in range(3)] == eager
    assert len(set(eager)) == 3 and compiled.traces == 1


def helper() -> jax.Array:
    return jax.random.uniform(draw(GLOBAL_RNG))


GLOBAL_RNG = tether.Rng(5)


def test_a_stream_reached_through_a_helper_is_found():
    GLOBAL_RNG.value = 5
    keys, after = by_hand(jax.random.key(5), 3)
    f = tether.jit(lambda: helper())
    expected = [float(jax.random.uniform(jax.random.wrap_key_data(jnp.asarray(k, jnp.uint32)))) for k in keys]
    assert [float(f()) for _ in range(3)] == expected
    assert data(GLOBAL_RNG.value) == after


def test_grad_and_checkpoint_draw_once():
    tether.seed(2)
    keys, after = by_hand(jax.random.key(2), 1)
    noise = float(jax.random.normal(jax.random.wrap_key_data(jnp.asarray(keys[0], jnp.uint32))))
    f = tether.checkpoint(lambda x: jnp.sin(x) * jax.random.normal(draw()))
    gradient = tether.grad(f)(0.5)
    assert float(gradient) == pytest.approx(np.cos(0.5) * noise, rel=1e-5)
    assert data(default_stream.value) == after


def test_lanes_differ_and_the_stream_outside_advances_once():
    tether.seed(4)
    keys, after = by_hand(jax.random.key(4), 1)
    drawn = tether.vmap(lambda x: x + jax.random.uniform(draw()))(jnp.zeros(5))
    assert len(set(drawn.tolist())) == 5
    assert data(default_stream.value) == after
    start = jax.random.wrap_key_data(jnp.asarray(keys[0], jnp.uint32))
    lanes = [jax.random.uniform(jax.random.split(jax.random.fold_in(start, lane))[1]) for lane in range(5)]
    np.testing.assert_array_equal(drawn, jnp.stack(lanes))


def test_several_draws_in_a_lane_differ_and_nested_lanes_differ():
    uniform = lambda: jax.random.uniform(draw())
    lanes = tether.vmap(tether.vmap(lambda x: jnp.stack([x + uniform(), x + uniform()])))
    assert len(set(tether.jit(lanes)(jnp.zeros((2, 3))).ravel().tolist())) == 12


def test_jit_inside_vmap_and_vmap_inside_jit():
    tether.seed(0)
    outside = tether.jit(tether.vmap(lambda x: x + jax.random.uniform(draw())))(jnp.zeros(3))
    tether.seed(0)
    plain = tether.vmap(lambda x: x + jax.random.uniform(draw()))(jnp.zeros(3))
    np.testing.assert_array_equal(outside, plain)
    tether.seed(0)
    inside = tether.vmap(tether.jit(lambda x: x + jax.random.uniform(draw())))(jnp.zeros(3))
    assert len(set(inside.tolist())) == 3


def test_scope_fixes_a_block_and_leaves_the_default_stream():
    tether.seed(0)
    before = data(default_stream.value)
    with tether.random.scope(9) as stream:
        assert current_stream() is stream
        keys, _ = by_hand(jax.random.key(9), 2)
        assert [data(draw()), data(draw())] == keys
        with tether.random.scope(10):
            assert [data(draw())] == by_hand(jax.random.key(10), 1)[0]
        assert data(draw()) == by_hand(jax.random.key(9), 3)[0][2]
    assert current_stream() is default_stream
    assert data(default_stream.value) == before


def test_scope_ends_with_an_exception():
    with pytest.raises(ValueError, match="boom"), tether.random.scope(1):
        raise ValueError("boom")
    assert current_stream() is default_stream


def test_scope_around_a_compiled_function_is_seen():
    f = tether.jit(lambda: jax.random.uniform(draw()))
    with tether.random.scope(1):
        first = float(f())
    with tether.random.scope(2):
        other = float(f())
    with tether.random.scope(1):
        again = float(f())
    expected = float(jax.random.uniform(jax.random.split(jax.random.key(1))[1]))
    assert first == again == expected != other
    assert f.traces == 1


def test_key_of_a_call_holds_below_it():
    class Inner(tether.Module):
        def __call__(self) -> Any:
            return draw()

    class Outer(tether.Module):
        def __init__(self):
            self.inner = Inner()

        def __call__(self) -> Any:
            return self.inner(), self.inner()

    keys, _ = by_hand(jax.random.key(6), 2)
    first, second = Outer()(key=jax.random.key(6))
    assert [data(first), data(second)] == keys
    assert current_stream() is default_stream


def test_an_exception_in_a_trace_takes_the_draws_back():
    tether.seed(3)
    before = data(default_stream.value)

    def f(x: Any) -> Any:
        draw()
        raise ValueError("boom")

    for transformed in (tether.jit(f), tether.grad(f), tether.vmap(f), tether.checkpoint(f)):
        with pytest.raises(ValueError, match="boom"):
            transformed(jnp.ones(2))
        assert data(default_stream.value) == before


def test_first_draw_of_a_process_may_be_inside_a_trace(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(default_stream, "_value", None)
    drawn = tether.grad(lambda x: x * jax.random.uniform(draw()))(1.0)
    assert float(drawn) == float(jax.random.uniform(jax.random.split(jax.random.key(0))[1]))
    assert isinstance(default_stream.value, jax.Array) and not isinstance(default_stream.value, jax.core.Tracer)
