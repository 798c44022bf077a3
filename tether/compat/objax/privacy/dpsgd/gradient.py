# SPDX-License-Identifier: Apache-2.0
"""Gradients that keep examples private.

| Objax | here | what differs |
| --- | --- | --- |
| PrivateGradValues | Vectorize of GradValues | vc=None finds the variables; arguments may be trees of arrays |
| use_norm_accumulation | the same two passes | the second has the keys of the first; states are written once |
| l2_norm_clip=0 | all zeros | without a NaN where a gradient is zero |
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tether.compat.objax import random
from tether.compat.objax._errors import ConflictError, MisuseError
from tether.compat.objax._names import class_name, repr_function
from tether.compat.objax.gradient import GradValues
from tether.compat.objax.module import Function, Module, Vectorize
from tether.compat.objax.typing import JaxArray
from tether.compat.objax.variable import BaseState, TrainRef, VarCollection
from tether.errors import describe
from tether.nn._inputs import at_least_float32

__all__ = ["PrivateGradValues"]


class PrivateGradValues(Module):
    """The gradients of DP-SGD: clipped for each microbatch, averaged, with noise. Takes the place of GradValues.

    Args:
        f: The loss of a microbatch, or a list or tuple that begins with it.
        vc: The variables; the gradients are those of its TrainVars. None finds those that f uses.
        noise_multiplier: Standard deviation of the noise, in units of ``l2_norm_clip``.
        l2_norm_clip: Greatest norm of what one microbatch adds, over all variables together.
        microbatch: Number of examples whose gradients are clipped as one.
        batch_axis: A zero for each argument of f.
        keygen: Where the keys of the noise come from.
        use_norm_accumulation: In one pass the norms, in another the gradients of the weighted loss: the same
            gradients, and those of the single microbatches are never in memory together.
    Raises:
        ConflictError: batch_axis has other numbers than zeros.
        MisuseError: a number is out of its range, or a batch isn't made of whole microbatches.
    Example:
        >>> w = objax.TrainVar(jnp.zeros(()))
        >>> loss = lambda x: ((w.value - x) ** 2).mean()
        >>> gv = objax.privacy.dpsgd.PrivateGradValues(loss, None, 0.0, l2_norm_clip=1.0, microbatch=1)
        >>> gradients, values = gv(jnp.array([1.0, 2.0, -3.0, 0.25]))
        >>> float(gradients[0]), float(values[0])  # the mean of -1, -1, 1 and -0.5
        (-0.375, 3.515625)
    References:
        Abadi et al. 2016, arXiv:1607.00133, algorithm 1.
        Lee and Kifer 2020, arXiv:2009.03106: norm accumulation.
    """

    def __init__(
        self,
        f: Callable[..., Any],
        vc: VarCollection | None,
        noise_multiplier: float,
        l2_norm_clip: float,
        microbatch: int,
        batch_axis: tuple[int | None, ...] = (0,),
        keygen: random.Generator = random.DEFAULT_GENERATOR,
        use_norm_accumulation: bool = False,
    ):
        if not all(axis == 0 for axis in batch_axis):
            raise ConflictError(
                "batch_axis needs to be an all zero tuple for PrivateGradValues.",
                got=f"batch_axis={batch_axis}",
                expected="a 0 for each argument: privacy is counted by the examples of axis 0",
                fix=f"batch_axis={(0,) * len(batch_axis)}",
            )
        _check_least("noise_multiplier", noise_multiplier, 0)
        _check_least("l2_norm_clip", l2_norm_clip, 0)
        _check_least("microbatch", microbatch, 1)
        self.__wrapped__ = GradValues(f, vc)
        self.batch_axis = batch_axis
        self.microbatch = microbatch
        self.l2_norm_clip = l2_norm_clip
        self.noise_multiplier = noise_multiplier
        self.keygen = keygen
        make = _accumulated if use_norm_accumulation else _clipped_one_by_one
        self.clipped_grad = make(self.__wrapped__, batch_axis, l2_norm_clip)

    def reshape_microbatch(self, x: Any) -> JaxArray:
        """Parts the examples of an array: [batch, ...] -> [batch // microbatch, microbatch, ...]."""
        shape = np.shape(x)
        if not shape or shape[0] == 0 or shape[0] % self.microbatch:
            size = self.microbatch
            raise MisuseError(
                "PrivateGradValues: the batch isn't made of whole microbatches.",
                got=describe(x),
                expected=f"a first axis of {size}, {2 * size}, {3 * size} ... examples",
                fix=["leave the rest of the examples out", "microbatch=1"],
            )
        return x.reshape(shape[0] // self.microbatch, self.microbatch, *shape[1:])

    def __call__(self, *args: Any) -> tuple[list[JaxArray], Any]:
        """``(gradients, values)``: private gradients, and the values of f, averaged over the microbatches.

        The values are not private.
        """
        batches = jax.tree.map(self.reshape_microbatch, args)
        gradients, values = self.clipped_grad(*batches)
        stddev = self.l2_norm_clip * self.noise_multiplier / len(jax.tree.leaves(batches)[0])
        return [self._noisy(gradient, stddev) for gradient in gradients], values

    def _noisy(self, gradient: JaxArray, stddev: float) -> JaxArray:
        noise = random.normal(gradient.shape, stddev=stddev, generator=self.keygen)
        return gradient + noise.astype(gradient.dtype)

    def __repr__(self) -> str:
        names = ("noise_multiplier", "l2_norm_clip", "microbatch", "batch_axis")
        args = ", ".join(f"{name}={getattr(self, name)}" for name in names)
        return f"{class_name(self)}(f={repr_function(self.__wrapped__.f)}, {args})"


def _check_least(name: str, value: Any, least: int) -> None:
    if isinstance(value, int | float) and not least <= value < math.inf:
        raise MisuseError(
            f"PrivateGradValues: {name} is out of its range.",
            got=f"{name}={value}",
            expected=f"a finite number of at least {least}",
        )


def _clipped_one_by_one(gv: GradValues, batch_axis: Any, clip: float) -> Callable[..., Any]:
    """The mean of clipped gradients: each microbatch has its own."""

    def clipped(*batch: Any) -> Any:
        gradients, values = gv(*batch)
        factor = _factor(_norm(gradients), clip)
        return [gradient * factor.astype(gradient.dtype) for gradient in gradients], values

    each = Vectorize(Function(clipped, gv.vars()), batch_axis=batch_axis)
    return lambda *batches: _mean(each(*batches))


def _accumulated(gv: GradValues, batch_axis: Any, clip: float) -> Callable[..., Any]:
    """The same gradients as those of one loss: that in which each microbatch counts by how much it is clipped."""

    def norm(*batch: Any) -> Any:
        gradients, values = gv(*batch)
        return _norm(gradients), values

    norm_of_each = Vectorize(Function(norm, gv.vars()), batch_axis=batch_axis)
    loss_of_each = Vectorize(Function(gv.f, gv.vars()), batch_axis=batch_axis)

    def weighted_loss(factors: JaxArray, *batches: Any) -> JaxArray:
        out = loss_of_each(*batches)
        losses = out[0] if isinstance(out, list | tuple) else out
        return (losses * factors.astype(losses.dtype)).mean()

    def clipped(*batches: Any) -> Any:
        states = [v for v in loss_of_each.vc if isinstance(v, BaseState) and not isinstance(v, TrainRef)]
        before = [state.value for state in states]
        norms, values = norm_of_each(*batches)
        for state, value in zip(states, before, strict=True):
            if state.value is not value:
                state.value = value  # else a norm would be of one dropout, and the gradient of another
        gradients, _ = GradValues(weighted_loss, gv.vc)(_factor(norms, clip), *batches)
        return gradients, _mean(values)

    return clipped


def _norm(gradients: list[JaxArray]) -> JaxArray:
    """The norm over all gradients together."""
    return jnp.sqrt(sum(jnp.square(gradient.astype(at_least_float32(gradient.dtype))).sum() for gradient in gradients))


def _factor(norm: JaxArray, clip: float) -> JaxArray:
    """By how much a gradient shrinks so that its norm is at most ``clip``."""
    return jnp.minimum(clip / jnp.maximum(norm, jnp.finfo(norm.dtype).tiny), 1)


def _mean(tree: Any) -> Any:
    return jax.tree.map(lambda x: jnp.mean(x, axis=0), tree)
