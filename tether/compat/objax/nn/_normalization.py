# SPDX-License-Identifier: Apache-2.0
"""Normalization by statistics of the batch, or of groups of channels.

| Objax | here | what differs |
| --- | --- | --- |
| BatchNorm, BatchNorm0D to 2D | the same | an input of other channels is an error, where it was broadcast |
| SyncedBatchNorm, SyncedBatchNorm0D to 2D | the same | the same |
| GroupNorm, GroupNorm0D to 2D | the same | the same, where channels went into the batch |
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from tether.compat.objax._errors import MisuseError
from tether.compat.objax._names import class_name
from tether.compat.objax._objects import Module
from tether.compat.objax.functional import parallel, rsqrt
from tether.compat.objax.variable import StateVar, TrainVar
from tether.errors import describe

__all__ = [
    "BatchNorm",
    "BatchNorm0D",
    "BatchNorm1D",
    "BatchNorm2D",
    "GroupNorm",
    "GroupNorm0D",
    "GroupNorm1D",
    "GroupNorm2D",
    "SyncedBatchNorm",
    "SyncedBatchNorm0D",
    "SyncedBatchNorm1D",
    "SyncedBatchNorm2D",
]


class BatchNorm(Module):
    """Normalizes by mean and variance of the batch, or, not training, by running ones.

    y = gamma * (x - mean) / sqrt(var + eps) + beta

    Args:
        dims: Shape of the variables: that of the input, with 1 for the axes of ``redux``.
        redux: Axes over which mean and variance go.
        momentum: Weight of the old running value in each step.
        eps: Added to the variance.
    Variables:
        running_mean, running_var: StateVar, float[dims]; written when training. The variance is the biased one.
        beta, gamma: TrainVar, float[dims].
    Raises:
        MisuseError: the statistics of x aren't of shape dims.
    Example:
        >>> norm = objax.nn.BatchNorm((1, 3), redux=(0,), momentum=0.5)
        >>> _ = norm(jnp.ones((4, 3)), training=True)
        >>> norm.running_mean.value.tolist()
        [[0.5, 0.5, 0.5]]
    References:
        Ioffe and Szegedy 2015, arXiv:1502.03167, algorithm 1.
    """

    def __init__(self, dims: Iterable[int], redux: Iterable[int], momentum: float = 0.999, eps: float = 1e-6):
        dims = tuple(dims)
        self.momentum = momentum
        self.eps = eps
        self.redux = tuple(redux)
        self.running_mean = StateVar(jnp.zeros(dims))
        self.running_var = StateVar(jnp.ones(dims))
        self.beta = TrainVar(jnp.zeros(dims))
        self.gamma = TrainVar(jnp.ones(dims))

    def __call__(self, x: Any, training: bool) -> jax.Array:
        """The normalized input.

        Args:
            x: An array.
            training: Whether by the statistics of x, which then change the running ones.
        """
        return self._normalized(x, training, update=True)

    def _normalized(self, x: Any, training: bool, update: bool) -> jax.Array:
        x = self._checked(x)
        if training:
            mean = self._mean(x)
            var = self._mean((x - mean) ** 2)
            if update:
                self._follow(self.running_mean, mean)
                self._follow(self.running_var, var)
        else:
            mean, var = self.running_mean.value, self.running_var.value
        return self.gamma.value * (x - mean) * rsqrt(var + self.eps) + self.beta.value

    def _mean(self, x: jax.Array) -> jax.Array:
        return x.mean(self.redux, keepdims=True)

    def _follow(self, running: StateVar, new: jax.Array) -> None:
        old = running.value
        running.value = old + (1 - self.momentum) * (new.reshape(old.shape) - old)

    def _checked(self, x: Any) -> jax.Array:
        x = jnp.asarray(x)
        dims = self.beta.shape
        reduced = {axis % x.ndim for axis in self.redux if -x.ndim <= axis < x.ndim}
        statistics = tuple(1 if axis in reduced else length for axis, length in enumerate(x.shape))
        if len(reduced) != len(self.redux) or (1,) * (x.ndim - len(dims)) + dims != statistics:
            raise MisuseError(
                f"{type(self).__name__}: the input doesn't have the shape that the variables have.",
                got=describe(x),
                expected=f"[{', '.join('...' if n in self.redux else str(d) for n, d in enumerate(dims))}]",
                fix="objax.util.image.nchw(x), if the channels are last" if x.ndim == len(dims) == 4 else None,
            )
        return x

    def __repr__(self) -> str:
        return self._shown(f"dims={self.beta.shape}, redux={self.redux}")

    def _shown(self, sizes: str) -> str:
        return f"{class_name(self)}({sizes}, momentum={self.momentum}, eps={self.eps})"


class _OfChannels(BatchNorm):
    """What the layers of one rank have in common: they are made of a number of channels.

    Attributes:
        _space: Number of axes behind the channels.
    """

    _space: ClassVar[int]

    def __init__(self, nin: int, momentum: float = 0.999, eps: float = 1e-6):
        super().__init__((1, nin, *(1,) * self._space), (0, *range(2, 2 + self._space)), momentum, eps)

    def __repr__(self) -> str:
        return self._shown(f"nin={self.beta.shape[1]}")


class BatchNorm0D(_OfChannels):
    """BatchNorm of vectors, float[batch, nin].

    Args:
        nin: Number of channels.
        momentum: As in BatchNorm.
        eps: As in BatchNorm.
    """

    _space = 0


class BatchNorm1D(_OfChannels):
    """BatchNorm of sequences, float[batch, nin, length].

    Args:
        nin: Number of channels.
        momentum: As in BatchNorm.
        eps: As in BatchNorm.
    """

    _space = 1


class BatchNorm2D(_OfChannels):
    """BatchNorm of images, float[batch, nin, height, width].

    Args:
        nin: Number of channels.
        momentum: As in BatchNorm.
        eps: As in BatchNorm.
    """

    _space = 2


class SyncedBatchNorm(BatchNorm):
    """BatchNorm whose mean and variance are those of the batch on all devices of ``Parallel``.

    Args:
        dims: As in BatchNorm.
        redux: As in BatchNorm.
        momentum: As in BatchNorm.
        eps: As in BatchNorm.
    Variables:
        As in BatchNorm.
    """

    def __call__(self, x: Any, training: bool, batch_norm_update: bool = True) -> jax.Array:
        """The normalized input.

        Args:
            x: An array, the part of this device.
            training: Whether by the statistics of all parts; within ``Parallel`` alone.
            batch_norm_update: Whether those change the running ones.
        """
        return self._normalized(x, training, update=batch_norm_update)

    def _mean(self, x: jax.Array) -> jax.Array:
        return parallel.pmean(super()._mean(x))


class SyncedBatchNorm0D(_OfChannels, SyncedBatchNorm):
    """SyncedBatchNorm of vectors, float[batch, nin].

    Args:
        nin: Number of channels.
        momentum: As in BatchNorm.
        eps: As in BatchNorm.
    """

    _space = 0


class SyncedBatchNorm1D(_OfChannels, SyncedBatchNorm):
    """SyncedBatchNorm of sequences, float[batch, nin, length].

    Args:
        nin: Number of channels.
        momentum: As in BatchNorm.
        eps: As in BatchNorm.
    """

    _space = 1


class SyncedBatchNorm2D(_OfChannels, SyncedBatchNorm):
    """SyncedBatchNorm of images, float[batch, nin, height, width].

    Args:
        nin: Number of channels.
        momentum: As in BatchNorm.
        eps: As in BatchNorm.
    """

    _space = 2


class GroupNorm(Module):
    """Normalizes each group of channels of an example by its own mean and variance.

    Args:
        nin: Number of channels.
        rank: Of the input.
        groups: Number of groups; nin at most.
        eps: Added to the variance.
    Variables:
        gamma, beta: TrainVar, float[1, nin, 1, ...].
    Raises:
        MisuseError: the groups don't divide the channels, or the input isn't of that rank and number of channels.
    Example:
        >>> objax.nn.GroupNorm(4, rank=2, groups=2)(jnp.array([[1.0, 3.0, 5.0, 5.0]])).round(3).tolist()
        [[-1.0, 1.0, 0.0, 0.0]]
    References:
        Wu and He 2018, arXiv:1803.08494.
    """

    def __init__(self, nin: int, rank: int, groups: int = 32, eps: float = 1e-5):
        groups = min(groups, nin)
        if groups < 1 or nin % groups:
            raise MisuseError(
                "GroupNorm: nin should be divisible by groups.",
                got=f"nin={nin}, groups={groups}",
                expected="nin a multiple of groups",
            )
        self.nin = nin
        self.groups = groups
        self.eps = eps
        self.redux = tuple(range(2, rank + 1))
        shape = (1, nin) + (1,) * (rank - 2)
        self.gamma = TrainVar(jnp.ones(shape))
        self.beta = TrainVar(jnp.zeros(shape))

    def __call__(self, x: Any, training: bool = True) -> jax.Array:
        """The normalized input.

        Args:
            x: float[batch, nin, ...].
            training: Changes nothing: the layer can stand where BatchNorm stood.
        """
        x = jnp.asarray(x)
        rank = len(self.gamma.shape)
        if x.ndim != rank or x.shape[1] != self.nin:
            raise MisuseError(
                f"{type(self).__name__}: the input isn't of rank {rank} with {self.nin} channels.",
                got=describe(x),
                expected=f"[{', '.join(['batch', str(self.nin), *('...',) * (rank - 2)])}]",
                fix="objax.util.image.nchw(x), if the channels are last" if x.ndim == rank == 4 else None,
            )
        grouped = x.reshape(x.shape[0], self.groups, self.nin // self.groups, *x.shape[2:])
        mean = grouped.mean(self.redux, keepdims=True)
        var = grouped.var(self.redux, keepdims=True)
        normalized = ((grouped - mean) * rsqrt(var + self.eps)).reshape(x.shape)
        return normalized * self.gamma.value + self.beta.value

    def __repr__(self) -> str:
        return self._shown(f"nin={self.nin}, rank={len(self.gamma.shape)}")

    def _shown(self, sizes: str) -> str:
        return f"{class_name(self)}({sizes}, groups={self.groups}, eps={self.eps})"


class _GroupNormOfRank(GroupNorm):
    """What the layers of one rank have in common.

    Attributes:
        _rank: Of the input.
    """

    _rank: ClassVar[int]

    def __init__(self, nin: int, groups: int = 32, eps: float = 1e-5):
        super().__init__(nin, rank=self._rank, groups=groups, eps=eps)

    def __repr__(self) -> str:
        return self._shown(f"nin={self.nin}")


class GroupNorm0D(_GroupNormOfRank):
    """GroupNorm of vectors, float[batch, nin].

    Args:
        nin: Number of channels.
        groups: As in GroupNorm.
        eps: As in GroupNorm.
    """

    _rank = 2


class GroupNorm1D(_GroupNormOfRank):
    """GroupNorm of sequences, float[batch, nin, length].

    Args:
        nin: Number of channels.
        groups: As in GroupNorm.
        eps: As in GroupNorm.
    """

    _rank = 3


class GroupNorm2D(_GroupNormOfRank):
    """GroupNorm of images, float[batch, nin, height, width].

    Args:
        nin: Number of channels.
        groups: As in GroupNorm.
        eps: As in GroupNorm.
    """

    _rank = 4
