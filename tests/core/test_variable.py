# SPDX-License-Identifier: Apache-2.0
"""Variables: what they hold, what a write keeps, what a write refuses."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tether
from tether._core.variable import as_key
from tether.errors import ArgumentError, DtypeError, ShapeError

KINDS = [tether.Param, tether.State, tether.Constant]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [0, 1.5, True, 2j, [1.0, 2.0], np.ones((2, 3)), jnp.arange(3)])
def test_declared_value(kind: Any, value: Any):
    if isinstance(value, list):
        value = np.asarray(value)
    variable = kind(value)
    assert type(variable) is kind
    assert isinstance(variable.value, jax.Array)
    np.testing.assert_array_equal(variable.value, np.asarray(value))
    assert variable.value.dtype == jnp.asarray(value).dtype
    assert not variable.value.weak_type


def test_declared_array_is_copied():
    given = np.zeros(2, np.float32)
    variable = tether.State(given)
    given[0] = 7
    assert variable.value.tolist() == [0, 0]
    array = jnp.zeros(2)
    variable = tether.State(array)
    array.delete()
    assert variable.value.tolist() == [0, 0]


def test_a_variable_of_a_variable_copies_its_value():
    first = tether.Param(jnp.ones(2))
    second = tether.Param(first)
    first.value = jnp.zeros(2)
    assert second.value.tolist() == [1, 1]


def test_kinds_can_be_subclassed():
    class Adapter(tether.Param):
        __slots__ = ()

    variable = Adapter(jnp.ones(2))
    assert type(variable) is Adapter and isinstance(variable, tether.Param)
    assert type(copy.deepcopy(variable)) is Adapter


class TestWrite:
    """A write keeps shape and dtype, strips the weak type, and refuses what loses something."""

    @pytest.mark.parametrize(
        ("dtype", "new"),
        [
            (jnp.float16, jnp.asarray(0.5, jnp.float32)),
            (jnp.float32, jnp.asarray(0.5, jnp.bfloat16)),
            (jnp.bfloat16, 0.5),
            (jnp.float32, 0.5),
            (jnp.float32, 3),
            (jnp.float32, np.float64(0.5)),
            (jnp.float32, jnp.asarray(3, jnp.int32)),
            (jnp.float32, True),
            (jnp.int32, True),
            (jnp.int32, jnp.asarray(5, jnp.int8)),
            (jnp.int32, 7),
            (jnp.complex64, 0.5),
            (jnp.bool_, True),
        ],
    )
    def test_is_cast_to_the_declared_dtype(self, dtype: Any, new: Any):
        variable = tether.State(jnp.zeros((), dtype))
        variable.value = new
        assert variable.value.dtype == dtype and not variable.value.weak_type
        assert complex(variable.value) == complex(new)

    @pytest.mark.parametrize(
        ("dtype", "new"),
        [
            (jnp.int32, 2.7),
            (jnp.int32, jnp.asarray(2.0)),
            (jnp.int32, np.float64(1)),
            (jnp.bool_, 2),
            (jnp.bool_, 1.0),
            (jnp.float32, 1j),
            (jnp.uint32, -1),
        ],
    )
    def test_refuses_a_lossy_change_of_kind(self, dtype: Any, new: Any):
        variable = tether.State(jnp.zeros((), dtype))
        before = variable.value
        with pytest.raises(DtypeError, match="lose") as caught:
            variable.value = new
        assert variable.value is before
        assert caught.value.expected == f"{jnp.dtype(dtype)}[]"

    @pytest.mark.parametrize("new", [jnp.ones(3), jnp.ones((1,)), jnp.ones((2, 1)), 1.0, np.ones(3)])
    def test_refuses_another_shape(self, new: Any):
        variable = tether.State(jnp.zeros((2,)))
        before = variable.value
        with pytest.raises(ShapeError) as caught:
            variable.value = new
        assert variable.value is before
        assert caught.value.expected == "float32[2]"
        assert caught.value.got is not None and caught.value.got.endswith(f"[{', '.join(map(str, np.shape(new)))}]")

    def test_error_points_at_the_line_of_the_assignment(self):
        variable = tether.State(jnp.zeros((2,)))
        with pytest.raises(ShapeError) as caught:
            variable.value = jnp.ones(3)  # this very line
        lines = [str(entry.statement) for entry in caught.traceback if entry.path.name == "test_variable.py"]
        assert "this very line" in lines[-1]

    @pytest.mark.parametrize("new", ["abc", None, object(), [[1.0, 2.0], [3.0]], {"a": 1.0}])
    def test_refuses_what_is_no_array(self, new: Any):
        variable = tether.State(jnp.zeros((2,)))
        before = variable.value
        with pytest.raises((DtypeError, ShapeError)):
            variable.value = new
        assert variable.value is before

    def test_of_a_cell_is_refused(self):
        variable = tether.State(jnp.zeros(2))
        with pytest.raises(DtypeError, match="can't be replaced"):
            variable.value = tether.State(jnp.ones(2))
        assert variable.value.tolist() == [0, 0]

    def test_weak_arithmetic_does_not_drift(self):
        """CASES 22: a float16 state and ordinary arithmetic, an int counter, a Python scalar."""
        half, count = tether.State(jnp.zeros(2, jnp.float16)), tether.State(0)
        for _ in range(3):
            half.value = 0.9 * half.value + jnp.asarray(0.1, jnp.float16)
            count.value = count.value + 1
        assert (half.value.dtype, half.value.weak_type) == (jnp.float16, False)
        assert (count.value.dtype, count.value.weak_type, int(count.value)) == (jnp.int32, False, 3)
        np.testing.assert_allclose(half.value, [0.271, 0.271], atol=1e-3)

    def test_of_float32_to_a_float16_state(self):
        half = tether.State(jnp.zeros(2, jnp.float16))
        half.value = half.value.astype(jnp.float32) * 0.9 + 0.1
        assert half.value.dtype == jnp.float16

    def test_under_x64_keeps_the_declared_dtype(self):
        variable = tether.State(jnp.zeros(2))
        with jax.enable_x64(True):
            variable.value = np.full(2, 0.1)
            assert variable.value.dtype == jnp.float32
        assert variable.value.tolist() == np.full(2, 0.1, np.float32).tolist()

    def test_keeps_the_device(self):
        device = jax.devices()[1]
        variable = tether.State(jax.device_put(jnp.zeros(2), device))
        assert variable.value.devices() == {device}
        variable.value = np.ones(2, np.float32)
        assert variable.value.devices() == {device}
        variable.value = jnp.ones(2)
        assert variable.value.devices() == {device}

    def test_keeps_the_sharding(self):
        mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
        variable = tether.State(jax.device_put(jnp.zeros(4), sharding))
        variable.value = jnp.arange(4.0)
        assert variable.value.sharding == sharding
        assert variable.value.tolist() == [0, 1, 2, 3]


class TestPytree:
    """``State(pytree)``: a cell for each leaf, in a module or not."""

    def test_outside_a_module(self):
        state: Any = tether.State({"a": jnp.zeros(2), "b": [jnp.ones(())]})
        state.value = {"a": jnp.ones(2), "b": [jnp.zeros(())]}
        assert state.value["a"].tolist() == [1, 1] and float(state.value["b"][0]) == 0
        assert [v.value.shape for v in tether.variables(state).values()] == [(2,), ()]

    def test_is_written_whole_or_not_at_all(self):
        class Net(tether.Module):
            def __init__(self):
                self.cache = tether.State({"a": jnp.zeros(2), "b": jnp.zeros(3)})

        net = Net()
        with pytest.raises(ShapeError):
            net.cache = {"a": jnp.ones(2), "b": jnp.ones(2)}
        assert net.cache["a"].tolist() == [0, 0]
        with pytest.raises(ShapeError, match="structure"):
            net.cache = {"a": jnp.ones(2)}
        net.cache = {"b": jnp.ones(3), "a": jnp.full(2, 2.0)}
        assert (net.cache["a"].tolist(), net.cache["b"].tolist()) == ([2, 2], [1, 1, 1])

    @pytest.mark.parametrize("empty", [(), None, {}])
    def test_without_leaves_has_no_cells(self, empty: Any):
        class Net(tether.Module):
            def __init__(self):
                self.cache = tether.State(empty)

        assert tether.variables(Net()) == {}
        assert Net().cache == empty


class TestRng:
    @pytest.mark.parametrize("given", [3, np.int64(3), np.int32(3)])
    def test_of_a_seed(self, given: Any):
        assert (tether.Rng(given).value == jax.random.key(3)).all()

    def test_of_keys(self):
        assert (tether.Rng(jax.random.key(3)).value == jax.random.key(3)).all()
        assert (tether.Rng(jax.random.PRNGKey(3)).value == jax.random.key(3)).all()
        assert (tether.Rng(np.asarray(jax.random.PRNGKey(3))).value == jax.random.key(3)).all()

    @pytest.mark.parametrize("given", [1.0, "a", None, jnp.ones(2), True])
    def test_refuses_what_is_no_key(self, given: Any):
        with pytest.raises(DtypeError, match="PRNG key"):
            tether.Rng(given)

    def test_write_takes_keys_and_seeds(self):
        rng = tether.Rng(0)
        rng.value = 5
        assert (rng.value == jax.random.key(5)).all()
        rng.value = jax.random.PRNGKey(6)
        assert (rng.value == jax.random.key(6)).all()
        with pytest.raises(DtypeError):
            rng.value = jnp.ones(2)
        assert (rng.value == jax.random.key(6)).all()

    def test_as_key_of_stacked_keys(self):
        assert as_key(jax.random.split(jax.random.PRNGKey(0), 3)).shape == (3,)

    def test_copies(self):
        rng = tether.Rng(jax.random.key(4, impl="rbg"))
        for other in (copy.deepcopy(rng), copy.copy(rng), pickle.loads(pickle.dumps(rng))):
            assert other is not rng and type(other) is tether.Rng
            assert str(jax.random.key_impl(other.value)) == "rbg"
            assert (jax.random.key_data(other.value) == jax.random.key_data(rng.value)).all()


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, lambda v: pickle.loads(pickle.dumps(v))])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int8, jnp.bool_])
def test_copies(copied: Any, dtype: Any):
    variable = tether.State(jnp.ones((2, 3), dtype), reduce="mean" if dtype == jnp.float32 else None)
    other = copied(variable)
    variable.value = jnp.zeros((2, 3), dtype)
    assert other.value.dtype == dtype and other.value.all()
    assert (type(other), other.reduce) == (tether.State, variable.reduce)


@pytest.mark.parametrize("reduce", ["avg", 1, "stack"])
def test_unknown_reduction_is_refused(reduce: Any):
    with pytest.raises(ArgumentError, match="no such reduction"):
        tether.State(0.0, reduce=reduce)


@pytest.mark.parametrize("value", ["abc", object(), {"a": "b"}, [1.0, "x"]])
def test_no_array_is_refused(value: Any):
    with pytest.raises(DtypeError, match="no array"):
        tether.Param(value)


def test_repr_names_no_values():
    assert repr(tether.Param(jnp.full((2,), 123.0))) == "Param(float32[2])"
    assert repr(tether.Rng(0)) == "Rng(key<fry>[])"


def test_inside_jit_the_declared_dtype_holds():
    state = tether.State(jnp.zeros(2, jnp.float16))

    @tether.jit
    def f(x: jax.Array) -> Any:
        state.value = x
        assert state.value.dtype == jnp.float16
        with pytest.raises(ShapeError):
            state.value = jnp.ones(3)
        with pytest.raises(DtypeError):
            state.value = jax.lax.complex(x, x)
        return state.value

    assert f(jnp.ones(2)).dtype == jnp.float16
    assert state.value.tolist() == [1, 1]
