# SPDX-License-Identifier: Apache-2.0
"""Files of leaves, byte for byte what Equinox 0.9.2 wrote: NumPy puts the records together."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tether.compat.equinox as eqx
from tests.tree.records import records
from tether.compat.equinox.experimental import StateIndex, get_state, set_state


class Net(eqx.Module):
    weight: Any
    act: Any
    index: StateIndex
    rate: float


def net(scale: float = 1.0, state: Any = None) -> Net:
    index = StateIndex()
    if state is not None:
        set_state(index, state)
    return Net(scale * jnp.arange(3.0), jax.nn.relu, index, scale)


def written(tree: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    eqx.tree_serialise_leaves(file, tree, **options)
    return file.getvalue()


def read(data: bytes, like: Any, **options: Any) -> Any:
    return eqx.tree_deserialise_leaves(io.BytesIO(data), like, **options)


ONE, TWO = np.array([1.0, 2.0], np.float32), np.array(3, np.int32)
WEIGHT = np.array([0, 1, 2], np.float32)
# state -> its records
STATES = {
    "none": (None, [False]),
    "array": (jnp.asarray(ONE), [True, True, ONE]),
    "tuple": ((jnp.asarray(ONE), jnp.asarray(TWO)), [True, False, 2, ONE, TWO]),
    "bfloat16": ((jnp.ones(2, jnp.bfloat16),), [True, False, 1, np.ones(2, jnp.bfloat16)]),
}


class TestBytes:
    @pytest.mark.parametrize("name", STATES)
    def test_a_module_both_ways(self, name: str):
        state, rows = STATES[name]
        data = records(WEIGHT, *rows, 1.0)
        assert written(net(1.0, state)) == data
        loaded = read(data, net(5.0))
        assert loaded.weight.tolist() == [0, 1, 2] and loaded.rate == 1.0 and loaded.act is jax.nn.relu
        if state is not None:
            assert eqx.tree_equal(get_state(loaded.index, state), state)

    def test_leaves_of_each_kind(self):
        tree = (jnp.array(1), np.array([1.0]), True, 2, 3.0, 4j, np.float32(5), np.float64(6), "text", object())
        data = records(np.int32(1), np.array([1.0]), True, 2, 3.0, 4j, np.float64(6))
        assert written(tree) == data  # Equinox left out NumPy's scalars but those that are numbers of Python
        like = (jnp.array(0), np.array([0.0]), False, 0, 0.0, 0j, np.float32(0), np.float64(0), "other", len)
        loaded = read(data, like)
        assert loaded == (1, [1.0], True, 2, 3.0, 4j, 0, 6, "other", len)
        assert list(map(type, loaded[2:8])) == list(map(type, like[2:8]))

    def test_a_file_of_a_program_with_float64(self):
        assert read(records(np.array([1.0, 2.0])), jnp.zeros(2)).dtype == jnp.float32

    def test_the_first_leaves_of_a_file(self, tmp_path: Path):
        (tmp_path / "both.eqx").write_bytes(records(1, 2.0))
        assert eqx.tree_deserialise_leaves(tmp_path / "both", 0) == 1


def test_state_that_is_there_stays():
    like = net(1.0, jnp.asarray(ONE))
    loaded = read(records(WEIGHT, True, True, 2 * ONE, 1.0), like)
    assert get_state(loaded.index, jnp.asarray(ONE)).tolist() == [2.0, 4.0]
    set_state(loaded.index, jnp.zeros(2))
    assert get_state(like.index, jnp.asarray(ONE)).tolist() == [1.0, 2.0]


def test_the_flag_of_an_index_is_not_in_the_file():
    like = eqx.tree_inference(net(), True)
    assert read(written(net(1.0, jnp.asarray(ONE))), like).index.inference is True
    assert read(written(net()), like).index.inference is True


def test_specs_of_ones_own():
    skip = lambda f, x: None if isinstance(x, jax.Array) else eqx.default_serialise_filter_spec(f, x)
    assert written([jnp.ones(2), 1], filter_spec=skip) == records(1)
    keep = lambda f, x: x if isinstance(x, jax.Array) else eqx.default_deserialise_filter_spec(f, x)
    old = jnp.zeros(2)
    assert read(records(1), [old, 0], filter_spec=keep)[0] is old
    assert (
        read(records(1, 2), {"a": 0, "b": 5}, filter_spec={"a": eqx.default_deserialise_filter_spec, "b": keep})["b"]
        == 2
    )


class TestMistakes:
    @pytest.mark.parametrize(
        ("data", "like", "text"),
        [
            (records(1), [0, 0], "the file ends before the last leaf.\n  at:       tree[1]"),
            (records(WEIGHT), [jnp.zeros(2)], "another leaf here.\n  at:       tree[0]\n  got:      float32[3]"),
            (records(2.0), {"a": 1}, "another leaf here.\n  at:       tree['a']\n  got:      float\n  expected: int"),
            (
                records(WEIGHT),
                [StateIndex()],
                "another leaf here.\n  at:       tree[0]\n  got:      float32[3]\n  expected: bool",
            ),
        ],
    )
    def test_what_does_not_fit_is_a_runtime_error(self, data: bytes, like: Any, text: str):
        with pytest.raises(RuntimeError) as caught:
            read(data, like)
        assert text in str(caught.value)

    def test_a_state_of_another_form(self):
        with pytest.raises(RuntimeError) as caught:
            read(records(WEIGHT, True, True, WEIGHT, 1.0), net(1.0, jnp.asarray(ONE)))
        assert "at:       tree.index" in str(caught.value) and "float32[3]" in str(caught.value)

    def test_a_state_that_has_no_form_in_a_file(self):
        with pytest.raises(NotImplementedError) as caught:
            written(net(1.0, {"mean": jnp.asarray(ONE)}))
        assert str(caught.value) == (
            "tree_serialise_leaves: this state is neither an array nor a tuple of arrays.\n"
            "  at:       tree.index\n"
            "  got:      {'mean': f32[2]}\n"
            "  expected: what a file has a form for\n"
            "  fix:      set_state(index, tuple(jax.tree.leaves(state)))"
        )
