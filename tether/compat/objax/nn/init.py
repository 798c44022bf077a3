# SPDX-License-Identifier: Apache-2.0
"""First values of weights, whose last axis is that of the outputs: HWIO for convolutions, IO for Linear.

| Objax | here | what differs |
| --- | --- | --- |
| gain_leaky_relu, kaiming_normal_gain, xavier_normal_gain | the same | Python floats |
| kaiming_normal, xavier_normal | the same draws | |
| truncated_normal, kaiming_truncated_normal, xavier_truncated_normal | the same draws | without SciPy |
| orthogonal | the same draws | by JAX's QR in place of NumPy's, so that it can be traced |
| identity | the same | |

All draw from ``objax.random.DEFAULT_GENERATOR``, one key a call.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from tether.compat.objax import random
from tether.compat.objax._errors import MisuseError

__all__ = [
    "gain_leaky_relu",
    "identity",
    "kaiming_normal",
    "kaiming_normal_gain",
    "kaiming_truncated_normal",
    "orthogonal",
    "truncated_normal",
    "xavier_normal",
    "xavier_normal_gain",
    "xavier_truncated_normal",
]


def gain_leaky_relu(relu_slope: float = 0.1) -> float:
    """The gain sqrt(2 / (1 + relu_slope^2)), which keeps the variance through a leaky_relu of that slope."""
    return math.sqrt(2 / (1 + relu_slope**2))


def identity(shape: Sequence[int], gain: float = 1) -> jax.Array:
    """The identity matrix times ``gain``.

    Raises:
        MisuseError: shape isn't of rank 2.
    References:
        Le et al. 2015, arXiv:1504.00941.
    """
    if len(shape) != 2:
        raise MisuseError("identity: the shape isn't that of a matrix.", got=f"shape={tuple(shape)}", expected="rank 2")
    return gain * jnp.eye(shape[0], shape[1])


def kaiming_normal_gain(shape: Sequence[int]) -> float:
    """The standard deviation sqrt(1 / fan_in); fan_in is the product of all lengths but the last.

    Example:
        >>> objax.nn.init.kaiming_normal_gain((2, 2, 4, 7))
        0.25
    """
    return math.sqrt(1 / max(math.prod(shape[:-1]), 1))


def kaiming_normal(shape: Sequence[int], gain: float = 1) -> jax.Array:
    """Normal numbers of standard deviation gain * kaiming_normal_gain(shape).

    References:
        He et al. 2015, arXiv:1502.01852.
    """
    return random.normal(shape, stddev=gain * kaiming_normal_gain(shape))


def kaiming_truncated_normal(shape: Sequence[int], lower: float = -2, upper: float = 2, gain: float = 1) -> jax.Array:
    """Truncated normal numbers of standard deviation gain * kaiming_normal_gain(shape).

    Args:
        shape: Of the result.
        lower: Where the normal distribution of standard deviation 1 is cut, before it is scaled.
        upper: Likewise.
        gain: Factor.
    """
    return truncated_normal(shape, lower, upper, gain * kaiming_normal_gain(shape))


def orthogonal(shape: Sequence[int], gain: float = 1, axis: int = -1) -> jax.Array:
    """A random orthogonal matrix, uniform among all, times ``gain``.

    Args:
        shape: Of the result; with all axes but ``axis`` as one, it is a matrix.
        gain: Factor.
        axis: Of the rows of that matrix. The rows are orthonormal, or the columns where there are fewer of them.
    References:
        Saxe et al. 2014, arXiv:1312.6120.
    """
    others = list(shape)
    rows = others.pop(axis)
    columns = math.prod(others)
    q, r = jnp.linalg.qr(random.normal((max(rows, columns), min(rows, columns))))
    q = q * jnp.sign(jnp.diag(r))[None]  # makes the draw uniform: the signs of a QR are the algorithm's choice
    matrix = q.T if rows < columns else q
    return gain * jnp.moveaxis(matrix.reshape(rows, *others), 0, axis)


def truncated_normal(shape: Sequence[int], lower: float = -2, upper: float = 2, stddev: float = 1) -> jax.Array:
    """Truncated normal numbers of a standard deviation.

    Args:
        shape: Of the result.
        lower: Where the normal distribution of standard deviation 1 is cut, before it is scaled.
        upper: Likewise.
        stddev: Of the result.
    Raises:
        MisuseError: lower isn't below upper.
    """
    return random.truncated_normal(shape, stddev=stddev / _truncated_deviation(lower, upper), lower=lower, upper=upper)


def xavier_normal_gain(shape: Sequence[int]) -> float:
    """The standard deviation sqrt(2 / (fan_in + fan_out)); fan_out is the last length.

    Example:
        >>> objax.nn.init.xavier_normal_gain((3, 5))
        0.5
    """
    return math.sqrt(2 / max(math.prod(shape[:-1]) + shape[-1], 1))


def xavier_normal(shape: Sequence[int], gain: float = 1) -> jax.Array:
    """Normal numbers of standard deviation gain * xavier_normal_gain(shape).

    References:
        Glorot and Bengio 2010, https://proceedings.mlr.press/v9/glorot10a.html.
    """
    return random.normal(shape, stddev=gain * xavier_normal_gain(shape))


def xavier_truncated_normal(shape: Sequence[int], lower: float = -2, upper: float = 2, gain: float = 1) -> jax.Array:
    """Truncated normal numbers of standard deviation gain * xavier_normal_gain(shape).

    Args:
        shape: Of the result.
        lower: Where the normal distribution of standard deviation 1 is cut, before it is scaled.
        upper: Likewise.
        gain: Factor.
    """
    return truncated_normal(shape, lower, upper, gain * xavier_normal_gain(shape))


def _truncated_deviation(lower: float, upper: float) -> float:
    """The standard deviation of a standard normal number, given that it lies between two bounds."""
    if not lower < upper:
        raise MisuseError(
            "truncated_normal: lower isn't below upper.", got=f"lower={lower}, upper={upper}", expected="lower < upper"
        )
    if lower > 0:  # the same by symmetry, and without loss in the upper tail
        lower, upper = -upper, -lower
    mass = _below(upper) - _below(lower)
    mean = (_density(lower) - _density(upper)) / mass
    bounds = [bound * _density(bound) if math.isfinite(bound) else 0.0 for bound in (lower, upper)]
    return math.sqrt(1 + (bounds[0] - bounds[1]) / mass - mean**2)


def _density(x: float) -> float:
    return math.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)


def _below(x: float) -> float:
    return math.erfc(-x / math.sqrt(2)) / 2
