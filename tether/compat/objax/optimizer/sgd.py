# SPDX-License-Identifier: Apache-2.0
"""Stochastic gradient descent.

| Objax | here | what differs |
| --- | --- | --- |
| SGD(vc) | p -= lr g | gradients of another shape are an error |
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tether.compat.objax._names import class_name
from tether.compat.objax.module import Module
from tether.compat.objax.optimizer._gradients import check_gradients, like, trainable
from tether.compat.objax.variable import VarCollection

__all__ = ["SGD"]


class SGD(Module):
    """Stochastic gradient descent.

    Args:
        vc: The variables; its TrainVars are changed.
    Example:
        >>> v = objax.TrainVar(jnp.array([1.0, 2.0]))
        >>> optimizer = objax.optimizer.SGD(objax.VarCollection(v=v))
        >>> optimizer(0.5, [jnp.array([1.0, -1.0])])
        >>> v.value.tolist()
        [0.5, 2.5]
    """

    def __init__(self, vc: VarCollection):
        self.train_vars = trainable(vc)

    def __call__(self, lr: Any, grads: Sequence[Any]) -> None:
        """Takes a step.

        Args:
            lr: Learning rate.
            grads: A gradient for each TrainVar, in the order of the collection.
        Raises:
            MisuseError: not as many gradients as TrainVars, or one of another shape.
        """
        check_gradients(self, grads)
        for g, p in zip(grads, self.train_vars, strict=True):
            p.value -= like(lr, p) * g

    def __repr__(self) -> str:
        return f"{class_name(self)}()"
