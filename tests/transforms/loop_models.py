# SPDX-License-Identifier: Apache-2.0
"""What the tests of loops and branches share: a model with every kind of state, and how results are compared."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import tether
from tether import nn
from tether.random._streams import default_stream

XS = np.random.default_rng(7).normal(size=(3, 4, 3)).astype(np.float32)  # [turn, batch, feature]


class Net(tether.Module):
    """A mask, a counter, and a hidden state that is read after it was written."""

    def __init__(self, seed: int = 0):
        k1, k2 = jax.random.split(jax.random.key(seed))
        self.linear = nn.Linear(3, 3, key=k1)
        self.dropout = nn.Dropout(0.5)
        self.scale = tether.Param(jax.random.normal(k2, (3,)))
        self.hidden = tether.State(jnp.ones(3))
        self.calls = tether.State(0)

    def __call__(self, x):
        self.calls = self.calls + 1
        self.hidden = self.hidden * self.scale
        return self.dropout(self.linear(x)) * jnp.broadcast_to(self.hidden, x.shape) + x


def number(key: Any) -> Any:
    """A number in [0, 1) out of a key, by fewer operations than jax.random.uniform."""
    return (jax.random.key_data(key)[1] >> 8).astype(jnp.float32) / 2**24


class Noisy(tether.Module):
    """Draws from a stream of its own."""

    def __init__(self, seed: int = 0):
        self.rng = tether.Rng(seed)

    def __call__(self, x):
        return x + number(tether.random.draw(tether.cell(self, "rng")))


def without_jit(fun: Any) -> Any:
    def run(*args: Any) -> Any:
        with jax.disable_jit():
            return fun(*args)

    return run


WAYS = {"eager": lambda fun: fun, "jit": tether.jit, "disable_jit": without_jit}


def values(module: tether.Module) -> dict[str, Any]:
    return {path: variable.value for path, variable in tether.variables(module).items()}


def data(value: Any) -> Any:
    """An array that NumPy can hold: of keys, their bits."""
    return jax.random.key_data(value) if jnp.issubdtype(value.dtype, jax.dtypes.prng_key) else value


def same(found: Any, expected: Any) -> None:
    """Equal bit for bit: trees, dtypes, weak types and values; and nothing is traced."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (a.dtype, getattr(a, "weak_type", None)) == (b.dtype, getattr(b, "weak_type", None))
        np.testing.assert_array_equal(data(a), data(b))


def close(found: Any, expected: Any, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(data(a), data(b), rtol=rtol, atol=atol)


def stream() -> list[int]:
    """The state of the default stream."""
    return jax.random.key_data(default_stream.value).tolist()


def advanced(times: int) -> list[int]:
    """The state of the default stream of seed 0 after some draws."""
    key = jax.random.key(0)
    for _ in range(times):
        key = jax.random.split(key)[0]
    return jax.random.key_data(key).tolist()


def distinct(rows: Any) -> bool:
    """Whether no two rows are equal."""
    rows = np.asarray(rows)
    return len(np.unique(rows.reshape(len(rows), -1), axis=0)) == len(rows)
