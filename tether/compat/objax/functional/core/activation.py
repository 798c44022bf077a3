# SPDX-License-Identifier: Apache-2.0
"""Activations.

| Objax | here | what differs |
| --- | --- | --- |
| celu, elu, leaky_relu, log_sigmoid, log_softmax, selu, softmax, softplus, swish | ``jax.nn`` | nothing |
| logsumexp | ``jax.scipy.special.logsumexp`` | nothing |
| relu, sigmoid | ``jax.nn`` | nothing |
| tanh | ``jnp.tanh`` | one argument, whatever JAX's has |
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import jax.scipy.special

__all__ = [
    "celu",
    "elu",
    "leaky_relu",
    "log_sigmoid",
    "log_softmax",
    "logsumexp",
    "relu",
    "selu",
    "sigmoid",
    "softmax",
    "softplus",
    "swish",
    "tanh",
]

celu = jax.nn.celu
elu = jax.nn.elu
leaky_relu = jax.nn.leaky_relu
log_sigmoid = jax.nn.log_sigmoid
log_softmax = jax.nn.log_softmax
logsumexp = jax.scipy.special.logsumexp
selu = jax.nn.selu
softmax = jax.nn.softmax
softplus = jax.nn.softplus
swish = jax.nn.swish


def relu(x: jax.Array) -> jax.Array:
    """What is above 0; 0 elsewhere. Can be pickled."""
    return jax.nn.relu(x)


def sigmoid(x: jax.Array) -> jax.Array:
    """1 / (1 + exp(-x))."""
    return jax.nn.sigmoid(jnp.asarray(x))


def tanh(x: jax.Array) -> jax.Array:
    """The hyperbolic tangent."""
    return jnp.tanh(x)
