# SPDX-License-Identifier: Apache-2.0
"""Recurrent cells: one step of one example.

| Equinox | here | what differs |
| --- | --- | --- |
| GRUCell, LSTMCell | the same fields and draws | |
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from tether.compat.equinox.module import Module, static_field
from tether.compat.equinox.nn._arguments import uniform

__all__ = ["GRUCell", "LSTMCell"]


class GRUCell(Module):
    """One step of a gated recurrent unit.

    r = sigmoid(W_ir x + b_r + W_hr h), z = sigmoid(W_iz x + b_z + W_hz h), n = tanh(W_in x + b_i + r (W_hn h + b_n)),
    h' = n + z (h - n); weight_ih has W_ir, W_iz and W_in below each other, weight_hh and bias likewise

    Args:
        input_size: Size of x.
        hidden_size: Size of h.
        use_bias: Whether the biases are there.
        key: PRNG key of the first values, which are U(-k, k), k = 1 / sqrt(hidden_size).
    Shapes:
        input: float[input_size], hidden: float[hidden_size] -> float[hidden_size]
    Example:
        >>> cell = eqx.nn.GRUCell(2, 4, key=jax.random.PRNGKey(0))
        >>> h, _ = jax.lax.scan(lambda h, x: (cell(x, h), None), jnp.zeros(4), jnp.ones((7, 2)))
        >>> h.shape
        (4,)
    References:
        Cho et al. 2014, arXiv:1406.1078, section 2.3.
    """

    weight_ih: jax.Array
    weight_hh: jax.Array
    bias: jax.Array | None
    bias_n: jax.Array | None
    input_size: int = static_field()
    hidden_size: int = static_field()
    use_bias: bool = static_field()

    def __init__(self, input_size: int, hidden_size: int, use_bias: bool = True, *, key: Any, **kwargs: Any):
        super().__init__(**kwargs)
        input_key, hidden_key, bias_key, new_key = jax.random.split(key, 4)
        limit = math.sqrt(1 / hidden_size)
        self.weight_ih = uniform(input_key, (3 * hidden_size, input_size), limit)
        self.weight_hh = uniform(hidden_key, (3 * hidden_size, hidden_size), limit)
        self.bias = uniform(bias_key, (3 * hidden_size,), limit) if use_bias else None
        self.bias_n = uniform(new_key, (hidden_size,), limit) if use_bias else None
        self.input_size = input_size
        self.hidden_size = hidden_size
        self.use_bias = use_bias

    def __call__(self, input: Any, hidden: Any, *, key: Any = None) -> jax.Array:
        """The next hidden state; the key is ignored."""
        bias, bias_n = (jnp.asarray(self.bias), jnp.asarray(self.bias_n)) if self.use_bias else (0, 0)
        from_input = jnp.split(jnp.asarray(self.weight_ih) @ input + bias, 3)
        from_hidden = jnp.split(jnp.asarray(self.weight_hh) @ hidden, 3)
        reset, update = (jax.nn.sigmoid(a + b) for a, b in zip(from_input[:2], from_hidden[:2], strict=True))
        new = jnp.tanh(from_input[2] + reset * (from_hidden[2] + bias_n))
        return new + update * (hidden - new)


class LSTMCell(Module):
    """One step of a long short-term memory.

    i, f, g, o = W_ih x + W_hh h + b in four parts, c' = sigmoid(f) c + sigmoid(i) tanh(g), h' = sigmoid(o) tanh(c')

    Args:
        input_size: Size of x.
        hidden_size: Size of h and of c.
        use_bias: Whether b is there.
        key: PRNG key of the first values, which are U(-k, k), k = 1 / sqrt(hidden_size).
    Shapes:
        input: float[input_size], hidden: (float[hidden_size], float[hidden_size]) -> as hidden, (h', c')
    Example:
        >>> cell = eqx.nn.LSTMCell(2, 4, key=jax.random.PRNGKey(0))
        >>> h, c = cell(jnp.ones(2), (jnp.zeros(4), jnp.zeros(4)))
        >>> h.shape, c.shape
        ((4,), (4,))
    References:
        Gers, Schmidhuber and Cummins 2000, doi:10.1162/089976600300015015.
    """

    weight_ih: jax.Array
    weight_hh: jax.Array
    bias: jax.Array | None
    input_size: int = static_field()
    hidden_size: int = static_field()
    use_bias: bool = static_field()

    def __init__(self, input_size: int, hidden_size: int, use_bias: bool = True, *, key: Any, **kwargs: Any):
        super().__init__(**kwargs)
        input_key, hidden_key, bias_key = jax.random.split(key, 3)
        limit = math.sqrt(1 / hidden_size)
        self.weight_ih = uniform(input_key, (4 * hidden_size, input_size), limit)
        self.weight_hh = uniform(hidden_key, (4 * hidden_size, hidden_size), limit)
        self.bias = uniform(bias_key, (4 * hidden_size,), limit) if use_bias else None
        self.input_size = input_size
        self.hidden_size = hidden_size
        self.use_bias = use_bias

    def __call__(self, input: Any, hidden: Any, *, key: Any = None) -> tuple[jax.Array, jax.Array]:
        """The next hidden state and cell; the key is ignored."""
        h, c = hidden
        gates = jnp.asarray(self.weight_ih) @ input + jnp.asarray(self.weight_hh) @ h
        i, f, g, o = jnp.split(gates + jnp.asarray(self.bias) if self.use_bias else gates, 4)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        return jax.nn.sigmoid(o) * jnp.tanh(c), c
