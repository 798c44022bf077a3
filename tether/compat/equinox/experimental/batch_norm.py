# SPDX-License-Identifier: Apache-2.0
"""Batch normalization that keeps its own statistics.

| Equinox | here | what differs |
| --- | --- | --- |
| BatchNorm | the same numbers | the number of leaves never changes; a scan over one that was never called works |

For new code: ``tether.nn.BatchNorm(mode="ema")`` takes the whole batch at once.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from tether.compat.equinox._errors import AxisError
from tether.compat.equinox.experimental.stateful import StateIndex, get_state, recall, set_state
from tether.compat.equinox.module import Module, static_field

__all__ = ["BatchNorm"]


class BatchNorm(Module):
    """Normalizes each channel by running statistics, which it updates first.

    running = momentum * running + (1 - momentum) * batch; y = (x - mean) / sqrt(var + eps) * weight + bias

    In the first call the statistics of the batch are the running ones. It is called on one example, inside a
    ``jax.vmap`` that names the axis of the batch.

    Args:
        input_size: Number of channels.
        axis_name: Name of the axis of the batch, or several.
        eps: Added to the variance, above 0.
        channelwise_affine: Whether there is a ``weight`` and a ``bias``.
        momentum: Weight of the old statistics, in [0, 1].
        inference: Whether the statistics are read only.
    Shapes:
        x: float[input_size, ...] -> float[input_size, ...]
    Raises:
        NameError: No ``jax.vmap`` around it names ``axis_name``.
        RuntimeError: It is called in inference, and never was in training.
    Example:
        >>> norm = eqx.experimental.BatchNorm(2, axis_name="batch")
        >>> jax.vmap(norm, axis_name="batch")(jnp.array([[1.0, 0.0], [3.0, 0.0]]))[:, 0].round(3).tolist()
        [-1.0, 1.0]
    """

    weight: jax.Array | None
    bias: jax.Array | None
    first_time_index: StateIndex
    state_index: StateIndex
    axis_name: Any
    inference: bool
    input_size: int = static_field()
    eps: float = static_field()
    channelwise_affine: bool = static_field()
    momentum: float = static_field()

    def __init__(
        self,
        input_size: int,
        axis_name: Any,
        eps: float = 1e-5,
        channelwise_affine: bool = True,
        momentum: float = 0.99,
        inference: bool = False,
        **kwargs: Any,
    ):
        super().__init__(**kwargs)
        self.weight = jnp.ones(input_size) if channelwise_affine else None
        self.bias = jnp.zeros(input_size) if channelwise_affine else None
        first_time = StateIndex()
        set_state(first_time, jnp.array(True))
        self.first_time_index = jax.tree.map(lambda _: inference, first_time)
        self.state_index = StateIndex(inference=inference)
        self.inference = inference
        self.axis_name = axis_name
        self.input_size, self.eps = input_size, eps
        self.channelwise_affine, self.momentum = channelwise_affine, momentum

    def __call__(self, x: jax.Array, *, key: Any = None, inference: bool | None = None) -> jax.Array:
        """Normalizes one example; ``inference`` other than None overrides the field, ``key`` is not used."""
        batch = self._statistics(x)
        if self.inference if inference is None else inference:
            mean, var = get_state(self.state_index, jax.lax.stop_gradient(batch))
        else:
            mean, var = self._updated(batch)
        shape = (-1,) + (1,) * (x.ndim - 1)
        out = (x - mean.reshape(shape)) / jnp.sqrt(var.reshape(shape) + self.eps)
        if self.weight is not None and self.bias is not None:
            out = out * self.weight.reshape(shape) + self.bias.reshape(shape)
        return out

    def _statistics(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        names = tuple(self.axis_name) if isinstance(self.axis_name, list) else self.axis_name
        flat = x.reshape(x.shape[0], -1)
        try:
            mean = jax.lax.pmean(flat.mean(axis=1), names)
        except NameError as error:
            raise AxisError(
                "BatchNorm: no vmap around it has the axis of the batch.",
                got=f"axis_name={self.axis_name!r}",
                fix=f"jax.vmap(model, axis_name={self.axis_name!r})(batch)",
            ) from error
        var = jax.lax.pmean(((flat - mean[:, None]) ** 2).mean(axis=1), names)
        return mean, var

    def _updated(self, batch: Any) -> Any:
        is_first = get_state(self.first_time_index, like=jnp.array(False))
        old = recall(self.state_index, like=jax.lax.stop_gradient(batch))
        old = jax.tree.map(lambda new, running: jnp.where(is_first, new, running), batch, old)
        running = jax.tree.map(lambda new, before: (1 - self.momentum) * new + self.momentum * before, batch, old)
        set_state(self.first_time_index, jnp.array(False))
        set_state(self.state_index, jax.lax.stop_gradient(running))
        return running
