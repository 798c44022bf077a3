# SPDX-License-Identifier: Apache-2.0
"""jit: donated state, failures, configurations."""

from __future__ import annotations

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tether
from tests.transforms.jit_models import Counter, Slots, W, X, expected
from tether import nn
from tether.errors import ArgumentError, DtypeError, StateLostError


class TestDonation:
    def test_buffers_are_reused(self):
        model = Slots()

        @tether.jit(donate_state=True)
        def step(model):
            model.a = model.a + 1
            return model.p.sum()

        step(model)  # the first call of a key runs undonated
        old, kept = model.a, model.p
        pointer = old.unsafe_buffer_pointer()
        step(model)
        assert old.is_deleted() and not kept.is_deleted()
        assert model.a.unsafe_buffer_pointer() == pointer
        np.testing.assert_array_equal(model.a, np.full(3, 3.0))

    def test_off_by_default(self):
        model = Slots()
        step = tether.jit(lambda model: setattr(model, "a", model.a + 1))
        step(model)
        old = model.a
        step(model)
        np.testing.assert_array_equal(old, np.full(3, 2.0))

    def test_snapshot_and_clone_stay_valid(self):
        model = Slots()
        step = tether.jit(lambda model: setattr(model, "a", model.a + 1), donate_state=True)
        step(model)
        snapshot, clone, state = tether.snapshot(model), tether.clone(model), tether.State(model.a)
        for _ in range(3):
            step(model)
        for copy in (snapshot.a, clone.a, state.value):
            np.testing.assert_array_equal(copy, np.full(3, 2.0))
        np.testing.assert_array_equal(model.a, np.full(3, 5.0))

    def test_first_call_keeps_what_was_read_before(self):
        model = Slots()
        before = model.a
        tether.jit(lambda model: setattr(model, "a", model.a + 1), donate_state=True)(model)
        np.testing.assert_array_equal(before, np.ones(3))

    @pytest.mark.parametrize("share", ["value", "alias"])
    @pytest.mark.parametrize("source", ["b", "p"])
    def test_two_cells_that_share_a_buffer(self, source, share):
        model = Slots()

        @tether.jit(donate_state=True)
        def step(model):
            model.a = model.a + model.p
            model.b = model.b * 2
            return model.a.sum()

        step(model)
        shared = getattr(model, source)
        model.a = shared if share == "value" else jax.device_put(shared, next(iter(shared.devices())))
        a, b = np.asarray(model.a).copy(), np.asarray(model.b).copy()
        for _ in range(3):
            step(model)
            a, b = a + 5.0, b * 2
        np.testing.assert_array_equal(model.a, a)
        np.testing.assert_array_equal(model.b, b)
        np.testing.assert_array_equal(model.p, np.full(3, 5.0))

    def test_cells_written_with_one_value(self):
        model = Slots()

        @tether.jit(donate_state=True)
        def step(model):
            model.a = model.b = model.a + model.b
            return model.p

        for total in (3.0, 6.0, 12.0, 24.0):
            step(model)
            np.testing.assert_array_equal(model.a, np.full(3, total))
            np.testing.assert_array_equal(model.b, np.full(3, total))

    def test_cell_written_with_a_kept_one(self):
        model = Slots()

        @tether.jit(donate_state=True)
        def step(model):
            model.b = model.a + model.b
            model.a = model.p

        for b in (3.0, 8.0, 13.0):
            step(model)
            np.testing.assert_array_equal(model.b, np.full(3, b))
            np.testing.assert_array_equal(model.a, np.full(3, 5.0))
            np.testing.assert_array_equal(model.p, np.full(3, 5.0))

    def test_an_argument_that_is_the_donated_array(self):
        model = Slots()
        step = tether.jit(lambda model, x: setattr(model, "a", model.a + x), donate_state=True)
        step(model, jnp.ones(3))
        for value in (4.0, 8.0):
            step(model, model.a)
            np.testing.assert_array_equal(model.a, np.full(3, value))

    def test_deleted_array_gives_an_error_with_the_path(self):
        first = nn.Sequential([Slots()])
        shared = jax.tree.map(lambda value: value, first)  # shares buffers, and says so
        step = tether.jit(lambda model: setattr(model[0], "a", model[0].a + 1), donate_state=True)
        step(first), step(shared), step(first)
        shared = jax.tree.map(lambda value: value, first)
        step(first)
        for call in (lambda: step(shared), lambda: tether.jit(lambda m: m[0].a.sum())(shared)):
            with pytest.raises(StateLostError, match=r"\[0\]\.a"):
                call()
        np.testing.assert_array_equal(first[0].a, np.full(3, 4.0))
        step(first)
        np.testing.assert_array_equal(first[0].a, np.full(3, 5.0))

    def test_lost_state_names_the_functions_that_may_have_taken_it(self):
        @tether.jit(donate_state=True)
        def train_step(model):
            model.a = model.a + 1

        @tether.jit(donate_state=True)
        def other_step(model):
            model.b = model.b + 1

        def error_of(name, read):
            getattr(model, name).delete()
            with pytest.raises(StateLostError) as info:
                tether.jit(read)(model)
            return str(info.value)

        model = Slots()
        for _ in range(2):
            train_step(model), other_step(model)
        assert "did not write; such a cell is donated by tether.jit(train_step)\n" in error_of("a", lambda m: m.a.sum())
        assert "did not write; such a cell is donated by tether.jit(other_step)\n" in error_of("b", lambda m: m.b.sum())
        del other_step
        gc.collect()
        assert "that it did not write\n" in error_of("b", lambda m: m.b.sum())
        assert "that it did not write\n" in error_of("p", lambda m: m.p.sum())

    def test_runtime_failure_after_donation(self):
        model, fail = Slots(), [False]

        def check(value):
            if fail[0]:
                raise ValueError("on purpose")
            return value

        @tether.jit(donate_state=True)
        def step(model):
            y = model.a + 1
            model.a = jax.pure_callback(check, jax.ShapeDtypeStruct(y.shape, y.dtype), y)
            model.b = model.b + 1
            return model.p.sum()

        step(model), step(model)
        snapshot = tether.snapshot(model)
        fail[0] = True
        with pytest.raises((StateLostError, jax.errors.JaxRuntimeError), match="on purpose|state was lost"):
            step(model)
            jax.block_until_ready([model.a, model.b])  # where the failure shows is the runtime's business
        fail[0] = False
        np.testing.assert_array_equal(snapshot.a, np.full(3, 3.0))
        tether.update(model, snapshot)
        step(model)
        np.testing.assert_array_equal(model.a, np.full(3, 4.0))

    def test_donation_inside_another_transformation_is_none(self):
        model = Slots()
        step = tether.jit(lambda model: (setattr(model, "a", model.a + 1), model.a.sum())[1], donate_state=True)
        outer = tether.jit(lambda model: step(model) + step(model))
        assert [float(outer(model)) for _ in range(2)] == [15.0, 27.0]
        np.testing.assert_array_equal(model.a, np.full(3, 5.0))


class TestFailures:
    @pytest.mark.parametrize("stop", [ValueError("stop"), KeyboardInterrupt()], ids=["error", "interrupt"])
    @pytest.mark.parametrize("donate", [False, True])
    def test_nothing_is_written_and_the_next_call_works(self, stop, donate):
        model = Counter()
        stopping = [stop]

        def body(x):
            y = model(x)
            model.weight = model.weight * 2
            if stopping:
                raise stopping[0]
            return y

        step = tether.jit(body, donate_state=donate)
        for _ in range(2):
            with pytest.raises(type(stop)):
                step(X)
            assert int(model.count) == 0
            np.testing.assert_array_equal(model.weight, W)
        stopping.clear()
        assert float(step(X)) == expected(1)
        assert float(step(X)) == expected(2, 2 * W)
        assert step.traces == 1

    def test_after_a_good_call(self):
        model, fail = Counter(), [False]

        def body(x):
            y = model(x)
            if fail[0]:
                raise ValueError("stop")
            return y

        step = tether.jit(body)
        step(X)
        fail[0] = True
        with pytest.raises(ValueError, match="stop"):
            step(X[:2])
        assert int(model.count) == 1
        fail[0] = False
        assert float(step(X[:2])) == expected(2, x=X[:2])

    def test_bad_write_names_path(self):
        model = nn.Sequential([Counter()])
        step = tether.jit(lambda m: setattr(m[0], "count", 2.7j))
        with pytest.raises(DtypeError, match=r"\[0\]\.count"):
            step(model)
        assert int(model[0].count) == 0

    def test_not_a_function(self):
        with pytest.raises(ArgumentError, match="jit"):
            tether.jit(3)

    def test_wrong_arguments_are_pythons_error(self):
        with pytest.raises(TypeError):
            tether.jit(lambda x: x)()


class TestConfiguration:
    @pytest.mark.mixed_dtypes
    def test_x64_between_two_calls(self):
        model = Counter()
        step = tether.jit(model)
        third = np.float64(1) / 3
        assert step(X).dtype == jnp.float32
        with jax.enable_x64(True):
            y = step(np.full((4, 3), third))
            assert y.dtype == jnp.float64
            np.testing.assert_allclose(float(y), 2 * 4 * third * -0.5, rtol=1e-12)
        assert float(step(X)) == expected(3)
        assert (int(model.count), model.count.dtype, model.weight.dtype) == (3, jnp.float32, jnp.float32)

    def test_matmul_precision_between_two_calls(self):
        model = Counter()
        step = tether.jit(model)
        texts = []
        for calls, precision in enumerate(["default", "highest", "default", "highest"], 1):
            with jax.default_matmul_precision(precision):
                assert float(step(X)) == expected(calls)
                texts.append("HIGHEST" in step.lower(X).as_text())
        assert texts == [False, True, False, True]
        assert int(model.count) == 4

    def test_alternating_configuration_compiles_once_for_each(self):
        model = Counter()
        step = tether.jit(model)
        for i in range(6):
            with jax.default_matmul_precision("highest" if i % 2 else "default"):
                step(X)
        assert step.traces == 2

    @pytest.mark.parametrize("donate", [False, True])
    def test_debug_nans_between_two_calls(self, donate):
        total = tether.State(0.0)

        @tether.jit(donate_state=donate)
        def step(x):
            total.value = total.value + 1
            return jnp.log(x) * total.value

        assert float(step(1.0)) == 0.0
        with jax.debug_nans(True):
            assert float(step(1.0)) == 0.0
            before = float(total.value)
            with pytest.raises((FloatingPointError, StateLostError) if donate else FloatingPointError):
                step(-1.0)
        if not donate:
            assert float(total.value) == before
        total.value = 5.0
        assert np.isnan(float(step(-1.0)))
        assert float(total.value) == 6.0

    def test_disable_jit(self):
        model = Counter()
        step = tether.jit(model)
        step(X)
        with jax.disable_jit():
            assert float(step(X)) == expected(2)
        assert float(step(X)) == expected(3)
        assert int(model.count) == 3
