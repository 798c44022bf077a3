# SPDX-License-Identifier: Apache-2.0
"""Adam, as Objax writes it.

| Objax | here | what differs |
| --- | --- | --- |
| Adam(vc, beta1, beta2, eps) | eps inside the root, the bias outside | gradients of another shape are an error |
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tether.compat.objax._names import class_name
from tether.compat.objax.module import Module
from tether.compat.objax.optimizer._gradients import check_gradients, counter, like, moments, trainable
from tether.compat.objax.variable import VarCollection

__all__ = ["Adam"]


class Adam(Module):
    """Adam.

    m += (1 - beta1) (g - m);  v += (1 - beta2) (g^2 - v);  p -= lr sqrt(1 - beta2^t) / (1 - beta1^t) m / sqrt(v + eps)

    Args:
        vc: The variables; its TrainVars are changed.
        beta1: Weight of the old mean of gradients, in [0, 1).
        beta2: Weight of the old mean of their squares, in [0, 1).
        eps: Is added to that mean, under the root.
    Example:
        >>> v = objax.TrainVar(jnp.array([1.0]))
        >>> optimizer = objax.optimizer.Adam(objax.VarCollection(v=v))
        >>> optimizer(0.25, [jnp.array([3.0])])
        >>> round(float(v.value[0]), 4)
        0.75
    References:
        Kingma and Ba 2015, arXiv:1412.6980, end of section 2; eps is elsewhere there.
    """

    def __init__(self, vc: VarCollection, beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8):
        self.beta1 = beta1
        self.beta2 = beta2
        self.eps = eps
        self.step = counter()
        self.train_vars = trainable(vc)
        self.m = moments(self.train_vars)
        self.v = moments(self.train_vars)

    def __call__(self, lr: Any, grads: Sequence[Any], beta1: Any = None, beta2: Any = None) -> None:
        """Takes a step.

        Args:
            lr: Learning rate.
            grads: A gradient for each TrainVar, in the order of the collection.
            beta1: In place of that of the optimizer.
            beta2: In place of that of the optimizer.
        Raises:
            MisuseError: not as many gradients as TrainVars, or one of another shape.
        """
        check_gradients(self, grads)
        beta1 = self.beta1 if beta1 is None else beta1
        beta2 = self.beta2 if beta2 is None else beta2
        self.step.value += 1
        t = self.step.value.astype(float)
        rate = like(lr, t) * (jnp.sqrt(1 - beta2**t) / (1 - beta1**t))
        for g, p, m, v in zip(grads, self.train_vars, self.m, self.v, strict=True):
            m.value += like(1 - beta1, p) * (g - m.value)
            v.value += like(1 - beta2, p) * (g**2 - v.value)
            p.value -= like(rate, p) * m.value * jax.lax.rsqrt(v.value + self.eps)

    def __repr__(self) -> str:
        return f"{class_name(self)}(beta1={self.beta1}, beta2={self.beta2}, eps={self.eps})"
