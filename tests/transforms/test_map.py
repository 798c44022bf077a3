# SPDX-License-Identifier: Apache-2.0
"""map against jax.lax.map."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tether
from tests.transforms.loop_models import XS, Net, advanced, close, distinct, same, stream, values
from tether import nn
from tether.errors import ArgumentError, VmapWriteError

ROWS = {"a": XS[:, 0], "b": jnp.arange(3)}


@pytest.mark.parametrize("batch_size", [None, 2, 3, 5])
def test_values_are_those_of_jax(batch_size):
    layer = nn.Linear(3, 2, key=jax.random.key(0))
    weight, bias = layer.weight, layer.bias
    expected = jax.lax.map(lambda x: (x["a"] @ weight.T + bias, [x["b"]]), ROWS)
    close(tether.map(lambda x: (layer(x["a"]), [x["b"]]), ROWS, batch_size=batch_size), expected)
    same(tether.map(lambda x: x * 2, jnp.ones((0, 3)), batch_size=batch_size), jnp.ones((0, 3)))


def test_state_is_updated_row_by_row():
    net, loop = Net().eval(), Net().eval()
    layers = tether.stack([nn.Linear(3, 3, key=jax.random.key(i)) for i in range(3)])
    found = tether.map(lambda x: (net(x[0]), x[1](x[0])), (XS, layers))
    rows = [loop(jnp.asarray(x)) for x in XS]
    close(found[0], jnp.stack(rows))
    close(values(net), values(loop))
    np.testing.assert_allclose(found[1], XS @ np.swapaxes(layers.weight, 1, 2) + layers.bias[:, None], rtol=1e-5)


class TestBatches:
    def test_writes_follow_the_rules_of_vmap(self):
        count, total = tether.State(0), tether.State(0.0, reduce="sum")

        def f(x):
            count.value = count.value + 1  # once a batch: the lanes of a batch are one call
            total.value = x
            return x

        tether.map(f, jnp.arange(1.0, 6.0), batch_size=2)
        assert int(count.value) == 3 and float(total.value) == 5

    def test_masks_differ_and_the_stream_advances_once(self):
        dropout = nn.Dropout(0.5)
        masks = tether.jit(lambda x: tether.map(dropout, x, batch_size=2))(jnp.ones((5, 32)))
        assert distinct(masks) and stream() == advanced(1)

    def test_modules_come_back(self):
        """New ones stacked once, with and without a rest; an existing one as itself."""

        class Row(tether.Module):
            def __init__(self, row):
                self.row, self.count = tether.Param(row), tether.State(0)

        net = Net()
        for count in (5, 4):
            rows = jnp.arange(2.0 * count).reshape(count, 2)
            new, again = tether.map(lambda row: (Row(row), net), rows, batch_size=2)
            assert again is net
            assert jax.tree.structure(new) == jax.tree.structure(tether.stack([Row(rows[0]), Row(rows[1])]))
            same((new.row, new.count), (rows, jnp.zeros(count, jnp.int32)))

    def test_failure_in_the_rest_changes_nothing(self):
        """The rest is traced after the batches have run."""
        count, turns = tether.State(0), []

        def f(x):
            count.value = count.value + 1
            tether.random.draw()
            turns.append(1)
            if len(turns) == 2:
                raise ValueError
            return x

        with pytest.raises(ValueError):
            tether.map(f, jnp.arange(5.0), batch_size=2)
        assert int(count.value) == 0 and stream() == advanced(0)
        tether.map(f, jnp.arange(5.0), batch_size=2)
        assert int(count.value) == 3 and stream() == advanced(1)


def test_errors():
    total, layers = tether.State(0.0), tether.stack([nn.BatchNorm(3), nn.BatchNorm(3)])

    def f(x):
        total.value = x
        return x

    with pytest.raises(VmapWriteError, match="differs from lane to lane"):
        tether.map(f, jnp.arange(3.0), batch_size=2)
    for size in (0, 2.0, True):
        with pytest.raises(ArgumentError, match=rf"no such batch size.\n +got: +{size}\n"):
            tether.map(jnp.sin, XS, batch_size=size)
    with pytest.raises(ArgumentError, match=r"runs over arrays alone.\n +got: +BatchNorm object"):
        tether.map(lambda x: x, layers, batch_size=2)
    with pytest.raises(ArgumentError, match=r"map: this has no first axis.*\n +at: +xs"):
        tether.map(jnp.sin, 3.0, batch_size=2)
    with pytest.raises(ArgumentError, match=r"this has no first axis.*\n +at: +xs"):
        tether.map(jnp.sin, 3.0)
