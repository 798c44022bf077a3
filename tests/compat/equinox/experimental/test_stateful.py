# SPDX-License-Identifier: Apache-2.0
"""get_state and set_state, wherever Equinox's worked: eager, compiled, mapped, differentiated, in loops."""

from __future__ import annotations

import copy
import pickle

import jax
import jax.numpy as jnp
import pytest

import tether
import tether.compat.equinox as eqx
from tether.compat.equinox.experimental import StateIndex, get_state, set_state
from tether.compat.equinox.experimental.stateful import restore, stored

JITS = {"eager": lambda f: f, "jax.jit": jax.jit, "filter_jit": eqx.filter_jit}


@pytest.fixture(params=JITS)
def jit(request):
    return JITS[request.param]


def counter(start: float = 0.0) -> StateIndex:
    index = StateIndex()
    set_state(index, jnp.array(start))
    return index


def add(index: StateIndex, x):
    set_state(index, get_state(index, jnp.zeros(())) + x)


class TestAnIndex:
    def test_has_one_leaf_for_ever(self):
        index = StateIndex()
        leaves, treedef = jax.tree.flatten(index)
        set_state(index, (jnp.ones(2), jnp.ones(3)))
        jax.jit(lambda: set_state(index, (jnp.zeros(2), jnp.ones(3))))()
        assert jax.tree.flatten(index) == (leaves, treedef) and leaves == [False]

    def test_copies_of_tree_functions_are_the_same_state(self):
        index = counter(1.0)
        other = jax.tree.map(lambda leaf: leaf, index)
        set_state(other, jnp.array(2.0))
        assert float(get_state(index, jnp.array(0.0))) == 2.0 and bool(other == index)
        assert eqx.tree_at(lambda i: i.inference, index, True) != index

    def test_deep_copies_are_others(self):
        index = counter(1.0)
        for other in (copy.deepcopy(index), pickle.loads(pickle.dumps(index))):
            set_state(other, jnp.array(5.0))
            assert (float(stored(index)), float(stored(other))) == (1.0, 5.0)

    def test_what_is_set_stays_whole_when_its_array_is_donated(self):
        x = jnp.ones(2)
        index = StateIndex()
        set_state(index, x)
        jax.jit(lambda x: x + 1, donate_argnums=0)(x)
        assert stored(index).tolist() == [1, 1]

    def test_stored_and_restored(self):
        index, other = StateIndex(), StateIndex()
        assert stored(index) is None
        with pytest.raises(KeyError, match="nothing was saved"):
            index.unsafe_get()
        set_state(index, {"a": jnp.ones(2)})
        restore(other, stored(index))
        assert stored(other)["a"].tolist() == [1, 1] == other.unsafe_get()[0]["a"].tolist()
        with pytest.raises(RuntimeError, match="differs from the index's in its shape or dtype"):
            restore(other, {"a": jnp.ones(3)})


class TestPrograms:
    def test_a_compiled_function_reads_and_writes(self, jit):
        index = counter()
        traces = []

        @jit
        def f(x):
            traces.append(x)
            add(index, x)
            return get_state(index, x)

        assert [float(f(jnp.array(x))) for x in (1.0, 2.0, 3.0)] == [1.0, 3.0, 6.0]
        set_state(index, jnp.array(10.0))
        assert float(f(jnp.array(1.0))) == 11.0 == float(stored(index))
        assert len(traces) == (4 if jit is JITS["eager"] else 1)

    def test_an_index_among_the_arguments(self):
        f = eqx.filter_jit(lambda index, x: (add(index, x), get_state(index, x))[1])
        one, two = counter(1.0), counter(2.0)
        assert [float(f(index, jnp.array(1.0))) for index in (one, two, one)] == [2.0, 3.0, 3.0]

    def test_the_first_value_in_a_compiled_function(self, jit):
        index = StateIndex()
        jit(lambda x: set_state(index, {"a": x}))(jnp.array(3.0))
        assert float(get_state(index, {"a": jnp.array(0.0)})["a"]) == 3.0

    def test_in_loops(self, jit):
        index = counter()

        def run(xs):
            jax.lax.scan(lambda c, x: (c, add(index, x)), 0, xs)
            jax.lax.fori_loop(0, 3, lambda i, c: (add(index, 100.0), c)[1], 0)
            return jax.lax.cond(xs[0] > 0, lambda: (add(index, 1000.0), 1)[1], lambda: 2)

        jit(run)(jnp.array([1.0, 2.0]))
        assert float(stored(index)) == 1303.0

    def test_in_gradients(self, jit):
        index = counter()

        def loss(w, x):
            add(index, jax.lax.stop_gradient(w * x))
            return w**2 * get_state(index, x)

        assert float(jit(jax.grad(loss))(3.0, jnp.array(2.0))) == 2 * 3.0 * 6.0

    def test_a_second_order_gradient(self):
        index = counter(2.0)
        f = lambda w: (add(index, 0.0), w**3 * get_state(index, w))[1]
        assert float(jax.grad(jax.grad(f))(3.0)) == 6 * 3.0 * 2.0

    def test_in_tethers_transformations(self):
        index = counter()
        step = tether.jit(lambda index, x: tether.grad(lambda w: (add(index, x), w * get_state(index, x))[1])(1.0))
        assert [float(step(index, jnp.array(x))) for x in (1.0, 2.0)] == [1.0, 3.0]
        tether.scan(lambda c, x: (c, add(index, x)), 0, jnp.array([1.0, 2.0]))
        assert float(stored(index)) == 6.0 and step.traces == 1


class TestLanes:
    def test_each_lane_has_its_own(self, jit):
        index = StateIndex()
        write = jit(jax.vmap(jax.vmap(lambda x: set_state(index, (x, jnp.array(0.0))))))
        read = lambda x: get_state(index, (x, jnp.array(0.0)))[0]
        x = jnp.arange(6.0).reshape(2, 3)
        write(x)
        assert jit(jax.vmap(jax.vmap(read)))(x * 0).tolist() == x.tolist()
        for other in (jax.vmap(jax.vmap(read), in_axes=1), jax.vmap(read), read):
            with pytest.raises(RuntimeError, match="differs from the saved state in its batch axes") as caught:
                jit(other)(x)
            assert "(float32[] in each of 2 x 3 lanes, float32[])" in str(caught.value)

    def test_all_lanes_share_what_is_the_same_in_all(self, jit):
        index = counter()
        step = jit(
            jax.vmap(
                lambda x: (add(index, jax.lax.pmean(x, "b")), x * get_state(index, jnp.array(0.0)))[1], axis_name="b"
            )
        )
        assert step(jnp.array([1.0, 3.0])).tolist() == [2, 6]
        assert step(jnp.array([1.0, 3.0])).tolist() == [4, 12]
        assert float(stored(index)) == 4.0

    def test_with_gradients_outside_and_inside(self, jit):
        for transform in (
            lambda f: jax.grad(lambda x: jax.vmap(f)(x).sum()),
            lambda f: jax.vmap(jax.grad(f)),
        ):
            index = StateIndex()
            f = lambda x: (set_state(index, jax.lax.stop_gradient(x) * 10), x * get_state(index, x))[1]  # noqa: B023
            assert jit(transform(f))(jnp.array([1.0, 2.0])).tolist() == [10, 20]
            assert stored(index).tolist() == [10, 20]

    def test_a_vmap_around_a_loop_or_a_compiled_function(self, jit):
        index = counter()
        step = lambda x: (add(index, jax.lax.stop_gradient(jax.lax.pmean(x, "b"))), x)[1]
        loop = lambda x: jax.lax.scan(lambda c, _: (c, step(x)), 0, None, length=3)[1]
        run = jit(
            jax.grad(lambda x: jax.vmap(lambda x: eqx.filter_jit(step)(x) + loop(x).sum(), axis_name="b")(x).sum())
        )
        assert run(jnp.array([1.0, 3.0])).tolist() == [4, 4]
        assert float(stored(index)) == 8.0
        run(jnp.array([1.0, 3.0]))
        assert float(stored(index)) == 16.0

    def test_lanes_around_lanes(self):
        index = counter()
        step = lambda x: (add(index, jax.lax.pmean(x, ("a", "b"))), x)[1]
        loop = lambda x: jax.lax.map(step, x)
        jax.vmap(jax.vmap(loop, axis_name="b"), axis_name="a")(jnp.arange(12.0).reshape(2, 2, 3))
        assert float(stored(index)) == 4.5 + 5.5 + 6.5


class TestInference:
    def test_reads_what_is_saved_now(self, jit):
        index = counter(1.0)
        frozen = eqx.tree_at(lambda i: i.inference, index, True)
        traces = []
        f = eqx.filter_jit(lambda index: (traces.append(1), get_state(index, jnp.zeros(())))[1])
        assert float(f(frozen)) == 1.0
        set_state(index, jnp.array(2.0))
        assert float(f(frozen)) == 2.0 and len(traces) == 1
        assert float(get_state(frozen, jnp.zeros(()))) == 2.0

    def test_is_a_constant_of_a_function_that_closes_over_it(self):
        index = counter(1.0)
        frozen = eqx.tree_at(lambda i: i.inference, index, True)
        f = jax.jit(lambda: get_state(frozen, jnp.zeros(())))
        assert float(f()) == 1.0
        set_state(index, jnp.array(2.0))
        assert float(f()) == 1.0 and float(get_state(frozen, jnp.zeros(()))) == 2.0

    def test_cannot_be_written(self):
        with pytest.raises(RuntimeError, match="in inference, where a state can be read only"):
            set_state(StateIndex(inference=True), jnp.array(1.0))


class TestMistakes:
    def test_nothing_saved(self, jit):
        with pytest.raises(RuntimeError, match="nothing was saved under this index yet"):
            jit(lambda: get_state(StateIndex(), jnp.array(0.0)))()

    @pytest.mark.parametrize(
        "other", [jnp.array([1.0]), jnp.array(1), [jnp.array(1.0)]], ids=["shape", "dtype", "tree"]
    )
    def test_another_form(self, jit, other):
        index = counter()
        with pytest.raises(RuntimeError, match=r"set_state: .* differs from what was saved before in its \w+"):
            jit(lambda: set_state(index, other))()
        with pytest.raises(RuntimeError, match="get_state: .* differs from the saved state"):
            jit(lambda: get_state(index, other))()
        assert float(stored(index)) == 0.0

    def test_no_arrays(self):
        with pytest.raises(TypeError, match="holds something else than arrays") as e:
            set_state(StateIndex(), {"a": jnp.array(1.0), "b": 0})
        assert "['b']" in str(e.value)
        with pytest.raises(TypeError, match="get_state: `like` holds something else"):
            get_state(counter(), 0.0)

    def test_a_gradient_through_the_state(self, jit):
        index = counter()
        with pytest.raises(NotImplementedError, match="a gradient would go through the state"):
            jit(jax.grad(lambda w: (set_state(index, w), w)[1]))(1.0)
        assert float(stored(index)) == 0.0

    def test_lanes_that_write_other_values_in_a_loop(self, jit):
        index = counter()
        write = lambda x: (jax.lax.scan(lambda c, _: (c, set_state(index, x)), 0, None, length=2), x)[1]
        with pytest.raises(RuntimeError, match="differs from lane to lane of a vmap around a loop"):
            jit(jax.vmap(write, axis_name="b"))(jnp.array([1.0, 2.0]))
        with pytest.raises(tether.errors.PlainTransformError, match="scan"):
            jit(jax.vmap(write))(jnp.array([1.0, 2.0]))
        assert float(stored(index)) == 0.0
