# SPDX-License-Identifier: Apache-2.0
"""Frames: reads after writes, what crosses plain traces, write-back of all or nothing, births."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tether
from tether import nn
from tether._core import frame
from tether._core.frame import Frame
from tether.errors import LeakError, PlainTransformError


def is_plain(variable: Any) -> bool:
    """Whether a Variable holds an array, and no Frame is left behind."""
    value = variable._value
    return isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer) and not frame.thread.frames


class TestFrame:
    def test_reads_what_it_was_given_then_what_was_written(self):
        a, b = tether.State(1.0), tether.State(2.0)
        layer = Frame("test")

        def fun() -> Any:
            seen = [float(a.value), float(b.value)]
            b.value = 5.0
            return [*seen, float(b.value)]

        out, written, values = layer.run({a: jnp.asarray(10.0)}, fun)
        assert out == [10, 2, 5]
        assert written == [b] and [float(v) for v in values] == [5]
        assert (float(a.value), float(b.value)) == (1, 2)
        assert list(layer.reads) == [a, b]
        assert layer.values == {}

    def test_inner_frames_answer_first_and_pass_on(self):
        a, b = tether.State(1.0), tether.State(2.0)
        outer, inner = Frame("outer"), Frame("inner")

        def within() -> Any:
            a.value = a.value + 1
            return float(a.value), float(b.value)

        def around() -> Any:
            b.value = 20.0
            out, written, values = inner.run({a: jnp.asarray(10.0)}, within)
            assert float(a.value) == 1
            frame.write_back(written, values)
            return out, float(a.value)

        out, written, _ = outer.run({}, around)
        assert out == ((11, 20), 11)
        assert written == [b, a]
        assert (float(a.value), float(b.value)) == (1, 2)

    def test_concerns_only_older_variables(self):
        layer = Frame("test")
        young = tether.State(1.0)

        def fun() -> Any:
            young.value = 2.0
            return None

        _, written, _ = layer.run({}, fun)
        assert written == [] and float(young.value) == 2

    def test_misses_are_noted_or_refused(self):
        a = tether.State(1.0)
        noting, refusing = Frame("note", miss="note"), Frame("pure", miss="refuse")
        noting.run({}, lambda: a.value)
        assert list(noting.missed) == [a]
        with pytest.raises(LeakError, match="not given"):
            refusing.run({}, lambda: a.value)
        assert not frame.thread.frames

    @pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
    def test_is_popped_by_whatever_is_raised(self, error: type[BaseException]):
        a = tether.State(1.0)

        def fun() -> Any:
            a.value = 2.0
            raise error

        with pytest.raises(error):
            Frame("test").run({}, fun)
        assert not frame.thread.frames and float(a.value) == 1

    def test_holds_nothing_afterwards(self):
        layer = Frame("test")
        a = tether.State(1.0)
        layer.run({a: jnp.ones(())}, lambda: None)
        assert (layer.values, layer.home, layer.outer, layer.lane) == ({}, None, None, None)

    def test_belongs_to_a_thread(self):
        a = tether.State(1.0)
        seen: list[float] = []

        def fun() -> Any:
            a.value = 2.0
            thread = threading.Thread(target=lambda: seen.append(float(a.value)))
            thread.start()
            thread.join()

        Frame("test").run({}, fun)
        assert seen == [1]


class TestReadAfterWrite:
    """Inside one function a read returns what was written, tangent and lane included."""

    def test_gradient_flows_through_state(self):
        state = tether.State(1.0)

        def f(w: Any) -> Any:
            state.value = w * state.value
            state.value = w * state.value
            return state.value  # w^2

        assert float(tether.grad(f)(3.0)) == 6
        assert float(state.value) == 9 and is_plain(state)

    def test_grad_of_grad(self):
        state = tether.State(1.0)

        def f(w: Any) -> Any:
            state.value = w * w * w
            return state.value

        assert float(tether.grad(tether.grad(f))(2.0)) == 12
        assert float(state.value) == 8 and is_plain(state)

    def test_tangents_of_one_grad_end_there(self):
        state = tether.State(0.0)

        def outer(w: Any) -> Any:
            def inner(v: Any) -> Any:
                state.value = w * v
                return v * v

            gradient = tether.grad(inner)(2.0)  # 4, of v alone
            return gradient + state.value  # 4 + 2w: the outer tangent is still there

        assert float(tether.grad(outer)(3.0)) == 2
        assert float(state.value) == 6 and is_plain(state)

    def test_lanes(self):
        state = tether.State(0.0, reduce="sum")

        def f(x: Any) -> Any:
            state.value = x
            return state.value * 2

        assert tether.vmap(f)(jnp.arange(3.0)).tolist() == [0, 2, 4]
        assert float(state.value) == 3 and is_plain(state)


class TestPlainTransformations:
    """Of closed-over modules: eager jax.grad and jax.vmap, and what is refused; tests/transforms has the table."""

    @pytest.mark.parametrize("transformed", [tether.grad, jax.grad], ids=["tether", "jax"])
    def test_gradient_twice_of_batchnorm(self, transformed: Callable[..., Any]):
        """CASES 1, by the library's and by JAX's grad: statistics move by each call and stay arrays."""
        norm = nn.BatchNorm(2, decay=0.9)
        x = np.random.default_rng(0).normal(size=(5, 2)).astype(np.float32)
        c = np.random.default_rng(1).normal(size=(5, 2)).astype(np.float32)

        def by_hand(x: Any) -> Any:
            return jnp.sum(c * (x - x.mean(0, keepdims=True)) / jnp.sqrt(x.var(0, keepdims=True) + 1e-5))

        with jax.checking_leaks():
            for step in (1, 2):
                gradient = transformed(lambda x: jnp.sum(c * norm(x)))(x)
                np.testing.assert_allclose(gradient, jax.grad(by_hand)(x), rtol=1e-4, atol=1e-5)
                np.testing.assert_allclose(norm.mean, x.mean(0) * (1 - 0.9**step), rtol=1e-5, atol=1e-6)
                assert is_plain(tether.cell(norm, "mean"))

    def test_grad_writes_are_stopped(self):
        state = tether.State(1.0)

        def f(x: Any) -> Any:
            state.value = x * 3
            return x * x

        assert float(jax.grad(f)(2.0)) == 4
        assert float(state.value) == 6 and is_plain(state)

    def test_read_that_would_lose_the_gradient_raises(self):
        state = tether.State(1.0)

        def f(x: Any) -> Any:
            state.value = x * 3
            return state.value * x

        with pytest.raises(PlainTransformError, match="gradient through it would be lost"):
            jax.grad(f)(2.0)
        assert is_plain(state)
        assert float(tether.grad(f)(2.0)) == 12
        assert float(state.value * 1) == 6

    def test_read_after_a_write_without_a_tangent_is_fine(self):
        state = tether.State(1.0)

        def f(x: Any) -> Any:
            state.value = state.value + 1
            return state.value * x

        assert float(jax.grad(f)(2.0)) == 2
        assert float(jax.grad(f)(2.0)) == 3

    def test_grad_in_a_later_trace_is_fine(self):
        state = tether.State(1.0)

        def write(x: Any) -> Any:
            state.value = x * 3
            return x

        jax.grad(write)(2.0)
        assert float(jax.grad(lambda x: x * state.value)(1.0)) == 6

    def test_vmap_of_the_same_value_in_every_lane(self):
        state = tether.State(1.0)

        def f(x: Any) -> Any:
            state.value = jax.lax.pmean(x, "batch")
            return x * state.value

        assert jax.vmap(f, axis_name="batch")(jnp.asarray([1.0, 3.0])).tolist() == [2, 6]
        assert float(state.value) == 2 and is_plain(state)

    def test_vmap_of_differing_values_raises(self):
        state = tether.State(1.0)

        def f(x: Any) -> Any:
            state.value = x
            return x

        with pytest.raises(PlainTransformError, match="lane to lane"):
            jax.vmap(f)(jnp.ones(2))
        assert float(state.value) == 1 and is_plain(state)

    def test_vmap_of_grad_and_grad_of_vmap(self):
        state = tether.State(2.0)
        f = lambda x: x * x * state.value
        assert jax.vmap(jax.grad(f))(jnp.asarray([1.0, 2.0])).tolist() == [4, 8]
        assert jax.grad(lambda x: jax.vmap(f)(x).sum())(jnp.asarray([1.0, 2.0])).tolist() == [4, 8]

    @pytest.mark.parametrize(
        "staged",
        [
            lambda f: jax.checkpoint(f)(1.0),
            lambda f: jax.jit(jax.checkpoint(f))(1.0),
            lambda f: jax.vmap(lambda x: jax.lax.cond(x > 0, f, lambda x: x, x))(jnp.ones(2)),
        ],
        ids="checkpoint jit-checkpoint vmap-cond".split(),
    )
    @pytest.mark.parametrize("action", ["read", "write"])
    def test_staged_ones_raise_and_are_not_cached(self, staged: Callable[..., Any], action: str):
        state, calls = tether.State(1.0), []

        def f(x: Any) -> Any:
            calls.append(1)
            if action == "read":
                return x + state.value
            state.value = jnp.zeros(())
            return x * 1

        for _ in range(2):
            count = len(calls)
            with pytest.raises(PlainTransformError) as caught:
                staged(f)
            assert len(calls) > count, "the trace was cached"
            assert caught.value.what.startswith("jax.") and f"{action}s a Variable" in caught.value.what
            assert float(state.value) == 1 and is_plain(state)
        assert float(tether.jit(f)(1.0)) in (1, 2)

    def test_modules_made_inside_are_free(self):
        @jax.jit
        def f(x: Any) -> Any:
            counter = tether.State(0.0)
            counter.value = counter.value + x
            return counter.value + nn.Linear(2, 1, key=jax.random.key(0))(jnp.zeros(2)).sum() * 0

        assert float(f(3.0)) == 3

    def test_modules_passed_in_are_values(self):
        linear = nn.Linear(2, 1)
        out = jax.jit(lambda m, x: m(x))(linear, jnp.ones(2))
        np.testing.assert_allclose(out, linear(jnp.ones(2)), rtol=1e-6)
        gradient = jax.grad(lambda m: m(jnp.ones(2)).sum())(linear)
        assert gradient.weight.tolist() == [[1, 1]]


class TestBirths:
    def smuggled(self, transformed: Callable[..., Any]) -> Any:
        box: list[Any] = []

        def f(x: Any) -> Any:
            box.append(tether.State(x * 2))
            return x

        transformed(f)
        return box[0]

    @pytest.mark.parametrize(
        "transformed",
        [
            lambda f: tether.jit(f)(1.0),
            lambda f: tether.grad(f)(1.0),
            lambda f: tether.vmap(f)(jnp.ones(2)),
            lambda f: tether.checkpoint(f)(1.0),
            lambda f: jax.jit(f)(1.0),
            lambda f: jax.grad(f)(1.0),
            lambda f: jax.lax.scan(lambda c, _: (f(c), None), 1.0, None, length=2),
        ],
        ids="jit grad vmap checkpoint jax.jit jax.grad scan".split(),
    )
    def test_a_smuggled_variable_raises_with_its_birthplace(self, transformed: Callable[..., Any]):
        state = self.smuggled(transformed)
        for use in (
            lambda: state.value,
            lambda: tether.jit(lambda: state.value)(),
            lambda: tether.grad(lambda x: x * state.value)(1.0),
            lambda: tether.snapshot(state),
        ):
            with pytest.raises(LeakError) as caught:
                use()
            assert "test_frame.py:" in (caught.value.got or "")

    def test_a_smuggled_module_raises(self):
        box: list[Any] = []

        @tether.jit
        def f(x: Any) -> Any:
            box.append(nn.Linear(2, 2))
            return x

        f(1.0)
        uses: list[Any] = [
            lambda: box[0](jnp.ones(2)),
            lambda: tether.jit(lambda x: box[0](x))(jnp.ones(2)),
            lambda: tether.jit(lambda m, x: m(x))(box[0], jnp.ones(2)),
            lambda: jax.tree.leaves(box[0]),
            lambda: tether.clone(box[0]),
        ]
        for use in uses:
            with pytest.raises(LeakError, match="outside the transformation"):
                use()

    def test_a_smuggled_variable_is_not_written_either(self):
        state = self.smuggled(lambda f: tether.jit(f)(1.0))
        with pytest.raises(LeakError):
            state.value = 3.0

    @pytest.mark.parametrize("transformed", [tether.jit, tether.vmap, tether.checkpoint])
    def test_one_that_is_returned_is_concrete(self, transformed: Callable[..., Any]):
        module = transformed(lambda x: tether.replace(nn.LayerNorm(2), {"weight": tether.Param(x)}))(
            jnp.ones((2, 2))[:2]
        )
        for variable in tether.variables(module).values():
            assert not isinstance(variable.value, jax.core.Tracer)

    def test_older_variables_of_an_inner_frame_are_lifted(self):
        @tether.jit
        def f(x: Any) -> Any:
            state = tether.State(x)

            def loss(w: Any) -> Any:
                state.value = state.value * w
                return state.value

            return tether.grad(loss)(3.0), state.value

        gradient, value = f(2.0)
        assert (float(gradient), float(value)) == (2, 6)


class TestWriteBack:
    def test_other_threads_see_all_or_nothing(self):
        cells = [tether.State(0) for _ in range(20)]
        stop, mixed = threading.Event(), []

        def watch() -> None:
            while not stop.is_set():
                values = frame.gather(cells)
                if any(value is not values[0] for value in values):
                    mixed.append(1)

        watcher = threading.Thread(target=watch)
        array = jnp.asarray(0)
        frame.write_back(cells, [array] * len(cells))
        watcher.start()
        for i in range(200):
            array = jnp.asarray(i)
            frame.write_back(cells, [array] * len(cells))
        stop.set()
        watcher.join()
        assert not mixed

    def test_drops_the_old_values(self):
        import weakref

        state = tether.State(jnp.ones(3))
        old = weakref.ref(state.value)
        frame.write_back([state], [jnp.zeros(3)])
        gc.collect()
        assert old() is None
