# SPDX-License-Identifier: Apache-2.0
"""Learning rates for each layer.

| Objax | here | what differs |
| --- | --- | --- |
| LARS(vc, momentum, weight_decay, tc, eps) | the same | gradients of another shape are an error |
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from tether.compat.objax._names import class_name
from tether.compat.objax.module import Module
from tether.compat.objax.optimizer._gradients import check_gradients, like, moments, trainable
from tether.compat.objax.variable import VarCollection

__all__ = ["LARS"]


class LARS(Module):
    """Gradient descent whose rate for each variable goes with the norms of the variable and its gradient.

    trust = tc |p| / (|g| + weight_decay |p| + eps), and at least 1 where a norm is 0
    m = momentum m + lr trust (g + weight_decay p);  p -= m

    Args:
        vc: The variables; its TrainVars are changed.
        momentum: Weight of the old steps, in [0, 1).
        weight_decay: Factor of the variable in its gradient.
        tc: Trust coefficient, below 1.
        eps: Is added to the norms that are divided by.
    References:
        You, Gitman and Ginsburg 2017, arXiv:1708.03888, algorithm 1.
    """

    def __init__(
        self,
        vc: VarCollection,
        momentum: float = 0.9,
        weight_decay: float = 1e-4,
        tc: float = 1e-3,
        eps: float = 1e-5,
    ):
        self.momentum = momentum
        self.weight_decay = weight_decay
        self.tc = tc
        self.eps = eps
        self.train_vars = trainable(vc)
        self.m = moments(self.train_vars)

    def __call__(self, lr: Any, grads: Sequence[Any]) -> None:
        """Takes a step.

        Args:
            lr: Learning rate; the paper lets it fall as (1 - t / T)^2.
            grads: A gradient for each TrainVar, in the order of the collection.
        Raises:
            MisuseError: not as many gradients as TrainVars, or one of another shape.
        """
        check_gradients(self, grads)
        for g, p, m in zip(grads, self.train_vars, self.m, strict=True):
            p_norm, g_norm = jnp.linalg.norm(p.value), jnp.linalg.norm(g)
            trust = self.tc * p_norm / (g_norm + self.weight_decay * p_norm + self.eps)
            least = jnp.logical_or(p_norm == 0, g_norm == 0).astype(trust.dtype)
            rate = like(lr, trust) * jnp.maximum(least, trust)
            m.value = self.momentum * m.value + rate * (g + self.weight_decay * p.value)
            p.value -= m.value

    def __repr__(self) -> str:
        return (
            f"{class_name(self)}(momentum={self.momentum}, weight_decay={self.weight_decay}, "
            f"tc={self.tc}, eps={self.eps})"
        )
