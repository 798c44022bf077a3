# SPDX-License-Identifier: Apache-2.0
"""Averages of variables over the steps.

| Objax | here | what differs |
| --- | --- | --- |
| ExponentialMovingAverage(vc, momentum, debias, eps) | the same | averages of whole numbers are floats from the start |
| replace_vars(f) | the same | what f uses is found through it: ``Jit(ema.replace_vars(f))`` |
| ExponentialMovingAverageModule(module, ...) | the same | nothing |
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tether.compat.objax._names import class_name
from tether.compat.objax.module import Module, ModuleList
from tether.compat.objax.optimizer._gradients import counter, like
from tether.compat.objax.variable import BaseVar, RandomState, StateVar, TrainRef, TrainVar, VarCollection

__all__ = ["ExponentialMovingAverage", "ExponentialMovingAverageModule"]


class ExponentialMovingAverage(Module):
    """Averages of variables, in which old values fade.

    m += (1 - momentum) (variable - m), from 0; with ``debias`` divided by 1 - (1 - eps) momentum^t

    Args:
        vc: The variables; all but random states have an average.
        momentum: Weight of the old average, in [0, 1).
        debias: Whether to take away the weight of the first 0.
        eps: Keeps the divisor from 0.
    Example:
        >>> v = objax.TrainVar(jnp.array([4.0]))
        >>> ema = objax.optimizer.ExponentialMovingAverage(objax.VarCollection(v=v), momentum=0.75)
        >>> ema()
        >>> ema.replace_vars(lambda: v.value)().tolist(), v.value.tolist()
        ([1.0], [4.0])
    """

    def __init__(self, vc: VarCollection, momentum: float = 0.999, debias: bool = False, eps: float = 1e-6):
        self.momentum = momentum
        self.debias = debias
        self.eps = eps
        self.step = counter()
        own = {id(v): v for v in (v.ref if isinstance(v, TrainRef) else v for v in vc)}.values()
        states = [v for v in own if not isinstance(v, TrainVar | RandomState)]
        self.refs = ModuleList([*states, *(TrainRef(v) for v in own if isinstance(v, TrainVar))])
        self.m = ModuleList(StateVar(jnp.zeros_like(v.value, dtype=_averaged_dtype(v))) for v in self.refs)

    def __call__(self) -> None:
        """Takes the values of now into the averages."""
        self.step.value += 1
        for ref, m in zip(self.refs, self.m, strict=True):
            m.value += like(1 - self.momentum, m) * (like(ref.value, m) - m.value)

    def refs_and_values(self) -> tuple[VarCollection, list[jax.Array]]:
        """The variables, and the average of each."""
        averages = [m.value for m in self.m]
        if self.debias:
            scale = 1 / (1 - (1 - self.eps) * self.momentum ** self.step.value.astype(float))
            averages = [m * like(scale, m) for m in averages]
        return self.refs.vars(), averages

    def replace_vars(self, f: Callable[..., Any]) -> Callable[..., Any]:
        """A function that calls f with the averages in place of the variables.

        After the call, and after an error too, the variables are as before.

        Args:
            f: A function or module.
        """
        wrap: Any = functools.partial(self._with_averages, f)
        wrap.__name__ = "wrap"  # as in names of variables: {wrap}(Linear).w
        return wrap

    def _with_averages(self, f: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        refs, averages = self.refs_and_values()
        before = [ref.value for ref in self.refs]
        try:
            refs.assign(averages)
            return f(*args, **kwargs)
        finally:
            for ref, value in zip(self.refs, before, strict=True):
                ref.assign(value, check=False)

    def __repr__(self) -> str:
        return f"{class_name(self)}(momentum={self.momentum}, debias={self.debias}, eps={self.eps})"


def _averaged_dtype(variable: BaseVar) -> Any:
    return variable.dtype if jnp.issubdtype(variable.dtype, jnp.inexact) else float


class ExponentialMovingAverageModule(Module):
    """A module that computes with the averages of the variables of another.

    Args:
        module: The other one.
        momentum: As in ExponentialMovingAverage.
        debias: As in ExponentialMovingAverage.
        eps: As in ExponentialMovingAverage.
    """

    def __init__(self, module: Module, momentum: float = 0.999, debias: bool = False, eps: float = 1e-6):
        self.__wrapped__ = module
        self.ema = ExponentialMovingAverage(module.vars(), momentum=momentum, debias=debias, eps=eps)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module with the averages in place of its variables."""
        return self.ema.replace_vars(self.__wrapped__)(*args, **kwargs)

    def update_ema(self) -> None:
        """Takes the values of now into the averages."""
        self.ema()

    def __repr__(self) -> str:
        return f"{class_name(self)}(momentum={self.ema.momentum}, debias={self.ema.debias}, eps={self.ema.eps})"
