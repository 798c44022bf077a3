# SPDX-License-Identifier: Apache-2.0
"""Variables and VarCollections of the home for Objax code."""

from __future__ import annotations

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tether
import tether.compat.objax as objax
from tether.compat.objax.variable import reduce_mean


def first(x):
    return x[0]


class TestValue:
    def test_trainvar_is_written_by_assign_alone(self):
        v = objax.TrainVar(jnp.arange(3.0))
        with pytest.raises(ValueError, match="TrainRef"):
            v.value = jnp.zeros(3)
        with pytest.raises(ValueError, match="TrainRef"):
            v.value += 1
        v.assign(v.value + 1)
        assert v.value.tolist() == [1, 2, 3]

    def test_assign_checks_kind_and_shape(self):
        v = objax.StateVar(jnp.zeros((2, 3)))
        for wrong in (np.zeros((2, 3)), [0.0], 1.0, jnp.zeros((3, 2)), jnp.zeros((2, 3, 1)), jnp.zeros((4, 2, 3))):
            with pytest.raises(AssertionError) as caught:
                v.assign(wrong)
            assert "got:" in str(caught.value) and "float32[2, 3]" in str(caught.value)
        assert v.value.tolist() == np.zeros((2, 3)).tolist()

    def test_state_takes_anything(self):
        v = objax.StateVar(jnp.zeros(2))
        v.value = jnp.ones((3, 1), jnp.int32)
        assert (v.shape, v.dtype, v.ndim) == ((3, 1), jnp.int32, 2)
        v.value = None
        assert v.value is None
        v.value = 2
        assert isinstance(v.value, jax.Array) and not v.value.weak_type
        v.value = "text"
        assert v.value == "text"

    def test_trainref_reads_and_writes_its_trainvar(self):
        v = objax.TrainVar(jnp.zeros(2))
        ref = objax.TrainRef(v)
        ref.value = ref.value + 1
        ref.assign(ref.value + 1)
        assert v.value.tolist() == ref.value.tolist() == [2, 2]
        with pytest.raises(AssertionError):
            ref.value = jnp.zeros(3)

    def test_reduce(self):
        mean, head, none = (objax.StateVar(jnp.zeros(2), reduce) for reduce in (reduce_mean, first, None))
        for v in (mean, head, none):
            v.reduce(jnp.array([[1.0, 2.0], [3.0, 6.0]]))
        assert [v.value.tolist() for v in (mean, head, none)] == [[2, 4], [1, 2], [0, 0]]

    def test_random_state_splits_as_jax_does(self):
        state = objax.RandomState(7)
        keys = jax.random.split(jax.random.PRNGKey(7), 4)
        np.testing.assert_array_equal(state.split(3), keys[1:])
        np.testing.assert_array_equal(state.value, keys[0])
        state.seed(7)
        np.testing.assert_array_equal(state.value, jax.random.PRNGKey(7))

    def test_copies(self):
        v = objax.StateVar(jnp.zeros(2), first)
        for other in (copy.deepcopy(v), pickle.loads(pickle.dumps(v))):
            other.value = other.value + 1
            assert v.value.tolist() == [0, 0] and other.value.tolist() == [1, 1]
            other.reduce(jnp.array([[5.0, 5.0], [7.0, 7.0]]))
            assert other.value.tolist() == [5, 5]

    def test_a_copy_is_apart(self):
        v = objax.TrainVar(jnp.zeros(2))
        ref, other = objax.TrainRef(v), copy.copy(v)
        other.assign(jnp.ones(2))
        assert v.value.tolist() == [0, 0] and other.value.tolist() == [1, 1]
        copy.copy(ref).value = jnp.full(2, 2.0)
        assert v.value.tolist() == [2, 2]

    def test_what_tree_functions_make_is_of_the_same_kind(self):
        class Registry:  # nobody looks for variables in a class
            state = jax.tree.map(lambda key: key, objax.RandomState(3))

        draw = objax.Vectorize(lambda x: jax.random.normal(Registry.state.split(1)[0]) + x)
        assert len(np.unique(draw(jnp.zeros(6)))) == 6

    @pytest.mark.parametrize("again", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["copy", "pickle"])
    def test_a_copy_is_found_as_itself(self, again):
        v = objax.TrainVar(jnp.full((), 3.0))

        class Registry:  # nobody looks for variables in a class
            other = again(v)

        gradient = objax.Grad(lambda x: Registry.other.value * x, None)
        assert float(gradient(2.0)[0]) == 2 and next(iter(gradient.vars())) is Registry.other

    def test_what_a_plain_transformation_uses_keeps_its_shape_and_dtype(self):
        v = objax.StateVar(jnp.zeros(3))
        plain = jax.jit(lambda: v.value.sum())
        plain()
        for wrong in (jnp.zeros(4), jnp.zeros(3, jnp.int32)):
            with pytest.raises(AssertionError, match="can't change its shape or dtype") as caught:
                v.value = wrong
            assert "test_variable.py" in str(caught.value) and "float32[3]" in str(caught.value)
        v.value = jnp.ones(3)
        assert float(plain()) == 3


class TestAsAnArray:
    def test_arithmetic_and_comparison(self):
        v, w = objax.TrainVar(jnp.array([4.0, 9.0])), objax.StateVar(jnp.array([2.0, 3.0]))
        a, b = np.array([4.0, 9.0]), np.array([2.0, 3.0])
        pairs = [
            (v + w, a + b), (1 + v, 1 + a), (v - w, a - b), (1 - v, 1 - a), (v * w, a * b), (v / w, a / b),
            (2 / v, 2 / a), (v // w, a // b), (v % w, a % b), (v**w, a**b), (2**w, 2**b), (v @ w, a @ b),
            (-v, -a), (abs(-v), a), (v == w, a == b), (v != w, a != b), (v < 5, a < 5), (v >= w, a >= b),
            (round(v / 3, 1), np.round(a / 3, 1)), (divmod(v, w)[1], np.divmod(a, b)[1]), (v[1], 9.0),
            (v.sum(), 13.0), (v.T, a), (jnp.sqrt(v), np.sqrt(a)), (np.asarray(v), a),
            (v.reshape(2, 1), a.reshape(2, 1)),
        ]  # fmt: skip
        for got, wanted in pairs:
            np.testing.assert_allclose(np.asarray(got), wanted, rtol=1e-6)
        flags = objax.StateVar(jnp.array([True, False]))
        np.testing.assert_array_equal(~flags, [False, True])
        np.testing.assert_array_equal(flags & True, [True, False])
        np.testing.assert_array_equal(objax.StateVar(jnp.array([3])) << 1, [6])

    def test_what_it_refuses(self):
        v = objax.TrainVar(jnp.ones(1))
        for use in (bool, len, float, int, hash):
            with pytest.raises(TypeError):
                use(v)
        with pytest.raises(TypeError, match="is None"):
            assert not v
        with pytest.raises(AttributeError):
            v.no_such_method()

    def test_iteration_ends(self):
        assert [float(x) for x in objax.TrainVar(jnp.array([1.0, 2.0]))] == [1, 2]

    def test_under_jitted_functions_of_jax(self):
        v = objax.TrainVar(jnp.array([1.0, 2.0]))
        assert float(jax.jit(lambda x: x.value.sum())(v)) == 3
        doubled = jax.tree.map(lambda x: 2 * x, v)
        assert isinstance(doubled, objax.TrainVar) and doubled.value.tolist() == [2, 4]
        doubled.assign(doubled.value + 1)
        assert v.value.tolist() == [1, 2]

    def test_representation(self):
        v = objax.TrainVar(jnp.zeros((2, 2)))
        assert repr(v) == "objax.TrainVar(Array([[0., 0.],\n       [0., 0.]], dtype=float32), reduce=reduce_mean)"
        assert repr(objax.TrainRef(v)) == f"objax.TrainRef(ref={v!r})"
        assert repr(objax.StateVar(jnp.zeros(1), None)) == "objax.StateVar(Array([0.], dtype=float32))"
        assert repr(objax.RandomState(0)) == "objax.RandomState(Array([0, 0], dtype=uint32))"


class TestTetherSeesIt:
    def test_tethers_own_transformations_take_its_variables(self):
        v, s = objax.TrainVar(jnp.array(2.0)), objax.StateVar(jnp.array(0.0))

        def f(x):
            s.value += 1
            return v.value * x**2

        step = tether.jit(tether.grad(f))
        assert [float(step(3.0)) for _ in range(2)] == [12, 12]
        v.assign(jnp.array(5.0))
        assert float(step(3.0)) == 30 and float(s.value) == 3 and step.traces == 1


class TestVarCollection:
    def make(self):
        a, b, s = objax.TrainVar(jnp.zeros(2)), objax.TrainVar(jnp.ones((2, 3))), objax.StateVar(jnp.ones(()))
        return a, b, s, objax.VarCollection({"a": a, "b": b, "again": a, "s": s})

    def test_is_a_dict_that_iterates_over_variables_once(self):
        a, b, s, vc = self.make()
        assert [v is w for v, w in zip(vc, (a, b, s), strict=True)] == [True] * 3
        assert list(vc.keys()) == ["a", "b", "again", "s"] and len(vc) == 4 and "again" in vc and vc["again"] is a

    def test_merging_finds_conflicts_by_identity(self):
        a, _, _, vc = self.make()
        merged = vc + objax.VarCollection({"a": a, "new": objax.TrainVar(jnp.zeros(2))})
        assert list(merged.keys()) == ["a", "b", "again", "s", "new"] and "new" not in vc
        twin = objax.TrainVar(jnp.zeros(2))  # of equal value
        with pytest.raises(ValueError, match=r"\['a', 'b'\]"):
            vc.update({"b": twin, "a": twin, "fresh": twin})
        with pytest.raises(ValueError, match="at: +a"):
            vc["a"] = twin
        vc["a"] = a
        assert "fresh" not in vc and vc["a"] is a

    def test_tensors_assign_subset_rename(self):
        a, b, s, vc = self.make()
        assert [t.shape for t in vc.tensors()] == [(2,), (2, 3), ()]
        assert [t.shape for t in vc.tensors(objax.StateVar)] == [()]
        vc.assign([t + 1 for t in vc.tensors()])
        assert a.value.tolist() == [1, 1] and float(s.value) == 2
        with pytest.raises(AssertionError, match="got: +2 tensors"):
            vc.assign([a.value, b.value])
        assert list(vc.subset(is_not=objax.TrainVar).keys()) == ["s"]
        assert list(vc.subset(objax.BaseVar, objax.StateVar).keys()) == ["a", "b", "again"]
        assert len(vc.subset()) == 0
        assert list(vc.rename(str.upper).keys()) == ["A", "B", "AGAIN", "S"]

    def test_text(self):
        *_, vc = self.make()
        assert str(vc).splitlines() == [
            "a                           2 (2,)",
            "b                           6 (2, 3)",
            "again                       2 (2,)",
            "s                           1 ()",
            "+Total(4)                  11",
        ]

    def test_replicate(self):
        a, _, s, vc = self.make()
        r = objax.RandomState(0)
        vc["r"], vc["ref"] = r, objax.TrainRef(a)
        keys = jax.random.split(jax.random.PRNGKey(0), 5)
        with vc.replicate():
            assert a.shape == (4, 2) and s.shape == (4,) and len(a.value.sharding.device_set) == 4
            np.testing.assert_array_equal(r.value, keys[1:])
            s.value = s.value * jnp.arange(4.0)
        assert a.shape == (2,) and float(s.value) == 1.5
        np.testing.assert_array_equal(r.value, keys[0])

    def test_replicate_ends_after_an_error(self):
        a, *_, vc = self.make()
        with pytest.raises(KeyError), vc.replicate():
            raise KeyError
        assert a.shape == (2,)
