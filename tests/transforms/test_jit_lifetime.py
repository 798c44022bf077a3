# SPDX-License-Identifier: Apache-2.0
"""jit: what it keeps alive, threads, random streams."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tether
from tests.transforms.jit_models import Counter, W, X, expected
from tether import nn


class TestMemory:
    def freed(self, *references) -> bool:
        gc.collect()
        return all(reference() is None for reference in references)

    def test_model_as_argument(self):
        step = tether.jit(lambda model, x: model(x))
        model = Counter()
        step(model, X)
        references = weakref.ref(model), weakref.ref(tether.cell(model, "weight"))
        live = len(jax.live_arrays())
        del model
        assert self.freed(*references)
        assert len(jax.live_arrays()) <= live - 2
        step(Counter(), X)
        assert step.traces == 1

    def test_many_models_leave_nothing(self):
        step = tether.jit(lambda model, x: model(x))
        step(Counter(), X)
        gc.collect()
        live = len(jax.live_arrays())
        for i in range(10):
            step(Counter(W + np.float32(i)), X)
        gc.collect()
        assert len(jax.live_arrays()) <= live + 1
        assert len(step._plans) <= 1

    def test_views_leave_nothing(self):
        model = Counter()
        step = tether.jit(lambda model, x: model(x))
        for _ in range(10):
            step(model.eval(), X), step(model.train(), X)
        assert step.traces == 2
        references = weakref.ref(model), weakref.ref(tether.cell(model, "weight"))
        del model
        assert self.freed(*references)

    def test_closed_over_model_dies_with_its_function(self):
        def build():
            model = Counter()
            step = tether.jit(lambda x: model(x))
            step(X)
            return weakref.ref(model), weakref.ref(step)

        assert self.freed(*build())

    def test_model_of_a_plain_object(self):
        class Trainer:
            def __init__(self):
                self.model = Counter()

            @tether.jit
            def step(self, x):
                return self.model(x)

        trainer = Trainer()
        trainer.step(X)
        references = weakref.ref(trainer), weakref.ref(trainer.model)
        del trainer
        assert self.freed(*references)

    def test_global_model_that_is_let_go(self):
        scope = {"model": Counter()}
        exec("def step(x):\n    return model(x)", scope)
        step = tether.jit(scope["step"])
        step(X)
        reference = weakref.ref(scope["model"])
        scope["model"] = None
        assert self.freed(reference)

    def test_a_failed_trace_leaves_nothing(self):
        def build():
            model = Counter()

            def body(m, x):
                m(x)
                raise ValueError("stop")

            step = tether.jit(body)
            with pytest.raises(ValueError, match="stop"):
                step(model, X)
            return weakref.ref(model), step

        reference, _ = build()
        assert self.freed(reference)


def race(inputs: list[Any]) -> dict[int, Any]:
    """Calls one jitted function three times from a thread for each input, all at once, each with a model of its own."""
    step = tether.jit(lambda model, x: model(x))
    models, results = [Counter() for _ in inputs], {}
    barrier = threading.Barrier(len(inputs))

    def work(i: int) -> None:
        barrier.wait()
        try:
            results[i] = [float(step(models[i], inputs[i])) for _ in range(3)]
        except BaseException as error:
            results[i] = error

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


class TestThreads:
    def test_evaluation_sees_a_whole_step(self):
        class Pair(tether.Module):
            def __init__(self):
                self.parts = [tether.State(jnp.zeros(4)) for _ in range(8)]

        model = Pair()

        @tether.jit
        def train(model):
            model.parts = tuple(part + 1 for part in model.parts)

        @tether.jit
        def evaluate(model):
            stacked = jnp.stack(model.parts)
            return stacked.max() - stacked.min(), stacked.max()

        train(model), evaluate(model)
        spreads, seen, done, faults = [], [], threading.Event(), []

        def watch():
            try:
                with jax.numpy_dtype_promotion("strict"):  # as the main thread, which compiled it
                    while not done.is_set():
                        spread, top = evaluate(model)
                        spreads.append(float(spread))
                        seen.append(float(top))
            except BaseException as error:
                faults.append(error)

        threads = [threading.Thread(target=watch) for _ in range(2)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(300):
                train(model)
        finally:
            done.set()
            for thread in threads:
                thread.join()
        assert not faults
        assert spreads and set(spreads) == {0.0}
        assert float(model.parts[0][0]) == 301.0
        assert (train.traces, evaluate.traces) == (1, 1)

    def test_threads_trace_one_function_for_different_shapes(self):
        results = race([X[: i + 1] for i in range(4)])
        assert results == {i: [expected(calls, x=X[: i + 1]) for calls in (1, 2, 3)] for i in range(4)}

    def test_threads_race_to_the_first_trace_of_one_program(self):
        assert race([X] * 4) == {i: [expected(calls) for calls in (1, 2, 3)] for i in range(4)}


class TestRandom:
    def test_dropout_under_jit_of_vmap_of_jit(self):
        dropout = nn.Dropout(0.5)
        inner = tether.jit(lambda x: dropout(x))
        outer = tether.jit(tether.vmap(inner))
        masks = np.stack([outer(jnp.ones((8, 32))) for _ in range(3)]).reshape(24, 32)
        assert set(np.unique(masks)) == {0.0, 2.0}
        assert len(np.unique(masks, axis=0)) == 24
        assert outer.traces == 1

    def test_jitted_draws_are_those_of_eager_code(self):
        draw = lambda: jax.random.uniform(tether.random.draw())
        eager = [float(draw()) for _ in range(3)]
        tether.seed(0)
        step = tether.jit(draw)
        assert [float(step()) for _ in range(3)] == eager
        assert len(set(eager)) == 3
        assert step.traces == 1

    def test_scope_and_key_argument(self):
        dropout, x = nn.Dropout(0.5), jnp.ones(64)
        step = tether.jit(lambda x: dropout(x))
        masks = []
        for seed in (0, 1, 0):
            with tether.random.scope(seed):
                masks.append(np.asarray(step(x)))
        assert step.traces == 1
        np.testing.assert_array_equal(masks[0], masks[2])
        assert (masks[0] != masks[1]).any()
        keyed = tether.jit(dropout)
        key = jax.random.key(3)
        np.testing.assert_array_equal(keyed(x, key=key), keyed(x, key=key))
        np.testing.assert_array_equal(keyed(x, key=key), dropout(x, key=key))
        assert (np.asarray(keyed(x, key=key)) != np.asarray(keyed(x, key=jax.random.key(4)))).any()
        assert keyed.traces == 1

    def test_evaluation_draws_nothing(self):
        dropout = nn.Dropout(0.5).eval()
        step = tether.jit(dropout)
        step(jnp.ones(3))
        assert step.writes == ()
