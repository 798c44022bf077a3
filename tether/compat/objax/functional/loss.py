# SPDX-License-Identifier: Apache-2.0
"""Losses.

| Objax | here | what differs |
| --- | --- | --- |
| cross_entropy_logits, mean_absolute_error, mean_squared_error, mean_squared_log_error | the same | |
| sigmoid_cross_entropy_logits | the same | a number as label, too; ``log1p`` keeps small values |
| cross_entropy_logits_sparse | the same | labels of another shape, or a number that is no class, are an error |
| l2 | the same | |

Where two shapes differ, they broadcast with a warning, as before.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tether.compat.objax._errors import MisuseError
from tether.compat.objax.functional.core import logsumexp
from tether.errors import describe

__all__ = [
    "cross_entropy_logits",
    "cross_entropy_logits_sparse",
    "l2",
    "mean_absolute_error",
    "mean_squared_error",
    "mean_squared_log_error",
    "sigmoid_cross_entropy_logits",
]

WARN_SHAPE_MISMATCH = "Argument shape mismatch in"


def cross_entropy_logits(logits: Any, labels: Any) -> jax.Array:
    """The cross-entropy of softmax(logits) with probabilities as labels.

    Args:
        logits: float[..., classes].
        labels: float[..., classes], of sum 1 along the last axis.
    Returns:
        float[...]
    Example:
        >>> losses = objax.functional.loss.cross_entropy_logits(jnp.zeros((1, 2)), jnp.array([[1.0, 0.0]]))
        >>> round(float(losses[0]), 4)
        0.6931
    """
    logits, labels = _pair("cross_entropy_logits", logits, labels)
    return logsumexp(logits, axis=-1) - (logits * labels).sum(-1)


def cross_entropy_logits_sparse(logits: Any, labels: Any) -> jax.Array:
    """The cross-entropy of softmax(logits) with the numbers of classes as labels.

    Args:
        logits: float[..., classes].
        labels: int[...], or one number for all.
    Returns:
        float[...]
    Raises:
        MisuseError: labels of another shape, or that aren't whole numbers; a number that is no class.
    Example:
        >>> losses = objax.functional.loss.cross_entropy_logits_sparse(jnp.zeros((1, 2)), jnp.array([1]))
        >>> round(float(losses[0]), 4)
        0.6931
    """
    logits = jnp.asarray(logits)
    if isinstance(labels, int | np.integer):
        return logsumexp(logits, axis=-1) - logits[..., _checked_class(logits, labels)]
    labels = jnp.asarray(labels)
    if labels.shape != logits.shape[:-1] or not jnp.issubdtype(labels.dtype, jnp.integer):
        raise MisuseError(
            "cross_entropy_logits_sparse: the labels aren't one class for each row of logits.",
            got=f"labels {describe(labels)}, logits {describe(logits)}",
            expected=f"labels int[{', '.join(map(str, logits.shape[:-1]))}]",
            fix="cross_entropy_logits, for probabilities" if labels.shape == logits.shape else None,
        )
    picked = jnp.take_along_axis(logits, labels[..., None], -1).squeeze(-1)
    return logsumexp(logits, axis=-1) - picked


def _checked_class(logits: jax.Array, label: Any) -> int:
    classes, number = logits.shape[-1], operator.index(label)
    if not -classes <= number < classes:
        raise MisuseError(
            "cross_entropy_logits_sparse: there is no such class.",
            got=f"labels={number}, logits {describe(logits)}",
            expected=f"0 to {classes - 1}",
        )
    return number


def l2(x: Any) -> jax.Array:
    """Half the sum of the squares.

    Example:
        >>> float(objax.functional.loss.l2(jnp.array([3.0, 4.0])))
        12.5
    """
    return 0.5 * (jnp.asarray(x) ** 2).sum()


def mean_absolute_error(x: Any, y: Any, keep_axis: Iterable[int] | None = (0,)) -> jax.Array:
    """The mean of abs(x - y) over all axes but those of ``keep_axis``; None for the mean over all.

    Example:
        >>> x, y = jnp.array([[1.0, 2.0], [3.0, 4.0]]), jnp.zeros((2, 2))
        >>> objax.functional.loss.mean_absolute_error(x, y).tolist()
        [1.5, 3.5]
    """
    x, y = _pair("mean_absolute_error", x, y)
    return _mean("mean_absolute_error", jnp.abs(x - y), keep_axis)


def mean_squared_error(x: Any, y: Any, keep_axis: Iterable[int] | None = (0,)) -> jax.Array:
    """The mean of (x - y)^2 over all axes but those of ``keep_axis``; None for the mean over all."""
    x, y = _pair("mean_squared_error", x, y)
    return _mean("mean_squared_error", (x - y) ** 2, keep_axis)


def mean_squared_log_error(y_true: Any, y_pred: Any, keep_axis: Iterable[int] | None = (0,)) -> jax.Array:
    """The mean of (log(1 + y_true) - log(1 + y_pred))^2 over all axes but those of ``keep_axis``; None for all."""
    y_true, y_pred = _pair("mean_squared_log_error", y_true, y_pred)
    return _mean("mean_squared_log_error", (jnp.log1p(y_true) - jnp.log1p(y_pred)) ** 2, keep_axis)


def sigmoid_cross_entropy_logits(logits: Any, labels: Any) -> jax.Array:
    """The cross-entropy of sigmoid(logits) with probabilities as labels, element by element.

    Args:
        logits: float[...].
        labels: float[...], in [0, 1].
    Returns:
        float[...]
    """
    logits, labels = _pair("sigmoid_cross_entropy_logits", logits, labels)
    return jnp.maximum(logits, 0) - logits * labels + jnp.log1p(jnp.exp(-jnp.abs(logits)))


def _pair(name: str, x: Any, y: Any) -> tuple[jax.Array, jax.Array]:
    """Two arrays; a warning where their shapes differ."""
    x, y = jnp.asarray(x), jnp.asarray(y)
    if x.shape != y.shape:
        warnings.warn(f" {WARN_SHAPE_MISMATCH} {name} : arg1 {x.shape} and arg2 {y.shape}", UserWarning, stacklevel=3)
    return x, y


def _mean(name: str, loss: jax.Array, keep_axis: Iterable[int] | None) -> jax.Array:
    kept = tuple(keep_axis or ())
    if any(axis < 0 for axis in kept):
        raise MisuseError(
            f"{name}: keep_axis counts axes from the front.",
            got=f"keep_axis={kept}, for {describe(loss)}",
            expected="numbers of axes, from 0",
            fix=f"keep_axis={tuple(axis % max(loss.ndim, 1) for axis in kept)}",
        )
    return loss.mean(tuple(axis for axis in range(loss.ndim) if axis not in kept))
