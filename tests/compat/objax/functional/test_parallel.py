# SPDX-License-Identifier: Apache-2.0
"""Reductions over devices, four in the tests."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

import tether.compat.objax as objax


@pytest.mark.parametrize("name", ["pmax", "pmean", "pmin", "psum"])
def test_reductions_of_a_tree_over_devices(name):
    reduce = getattr(objax.functional.parallel, name)
    x = jnp.array([3.0, -1.0, 5.0, 1.0, 0.0, 8.0, 2.0, 2.0])
    rows = np.asarray(x).reshape(4, 2)
    expected = {"pmax": rows.max(0), "pmean": rows.mean(0), "pmin": rows.min(0), "psum": rows.sum(0)}[name]
    first, twice = objax.Parallel(lambda x: reduce((x, 2 * x)), reduce=lambda y: y[0])(x)
    np.testing.assert_array_equal(first, expected)
    np.testing.assert_array_equal(twice, 2 * expected)


def test_another_name_of_the_axis():
    total = objax.Parallel(lambda x: objax.functional.parallel.psum(x, "rows"), axis_name="rows", reduce=lambda y: y[0])
    assert total(jnp.arange(4.0)).tolist() == [6.0]
    assert objax.functional.parallel.partial is functools.partial


def test_outside_of_parallel():
    with pytest.raises(NameError) as caught:
        objax.nn.SyncedBatchNorm0D(2)(jnp.ones((4, 2)), training=True)
    assert "got:      axis_name='device', and no such axis around this call" in str(caught.value)
    assert "objax.Parallel(f)(x)" in str(caught.value)
