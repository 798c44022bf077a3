# SPDX-License-Identifier: Apache-2.0
"""Gradient descent with momentum.

| Objax | here | what differs |
| --- | --- | --- |
| Momentum(vc, momentum, nesterov) | m = g + momentum m; p -= lr m | gradients of another shape are an error |
| nesterov | p -= lr (g + momentum m), with the new m | |
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tether.compat.objax._names import class_name
from tether.compat.objax.module import Module
from tether.compat.objax.optimizer._gradients import check_gradients, like, moments, trainable
from tether.compat.objax.variable import VarCollection

__all__ = ["Momentum"]


class Momentum(Module):
    """Gradient descent with momentum.

    Args:
        vc: The variables; its TrainVars are changed.
        momentum: Weight of the old gradients, in [0, 1).
        nesterov: Whether the step looks ahead.
    Example:
        >>> v = objax.TrainVar(jnp.array([1.0]))
        >>> optimizer = objax.optimizer.Momentum(objax.VarCollection(v=v), momentum=0.5)
        >>> for _ in range(2):
        ...     optimizer(0.25, [jnp.array([1.0])])
        >>> v.value.tolist()
        [0.375]
    """

    def __init__(self, vc: VarCollection, momentum: float = 0.9, nesterov: bool = False):
        self.momentum = momentum
        self.nesterov = nesterov
        self.train_vars = trainable(vc)
        self.m = moments(self.train_vars)

    def __call__(self, lr: Any, grads: Sequence[Any], momentum: Any = None) -> None:
        """Takes a step.

        Args:
            lr: Learning rate.
            grads: A gradient for each TrainVar, in the order of the collection.
            momentum: In place of that of the optimizer.
        Raises:
            MisuseError: not as many gradients as TrainVars, or one of another shape.
        """
        check_gradients(self, grads)
        momentum = self.momentum if momentum is None else momentum
        for g, p, m in zip(grads, self.train_vars, self.m, strict=True):
            m.value = g + like(momentum, p) * m.value
            step = g + like(momentum, p) * m.value if self.nesterov else m.value
            p.value -= like(lr, p) * step

    def __repr__(self) -> str:
        return f"{class_name(self)}(momentum={self.momentum}, nesterov={self.nesterov})"
