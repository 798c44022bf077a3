# SPDX-License-Identifier: Apache-2.0
"""Layers.

| Objax | here | what differs |
| --- | --- | --- |
| Linear, Conv2D, ConvTranspose2D | the same variables, in the same order | errors in words |
| Dropout | the same draws | a ``keep`` that is no probability is an error |
| MovingAverage, ExponentialMovingAverage | the same | an input of another shape is an error |
| BatchNorm, SyncedBatchNorm, GroupNorm, and of all three 0D to 2D | _normalization.py | see there |
| Sequential | _sequential.py | see there |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tether.compat.objax import random
from tether.compat.objax._errors import MisuseError
from tether.compat.objax._names import class_name, repr_function
from tether.compat.objax._objects import Module
from tether.compat.objax.constants import ConvPadding
from tether.compat.objax.functional.core._inputs import images, pair
from tether.compat.objax.nn._normalization import (
    BatchNorm,
    BatchNorm0D,
    BatchNorm1D,
    BatchNorm2D,
    GroupNorm,
    GroupNorm0D,
    GroupNorm1D,
    GroupNorm2D,
    SyncedBatchNorm,
    SyncedBatchNorm0D,
    SyncedBatchNorm1D,
    SyncedBatchNorm2D,
)
from tether.compat.objax.nn._sequential import Sequential
from tether.compat.objax.nn.init import kaiming_normal, xavier_normal
from tether.compat.objax.util import to_padding
from tether.compat.objax.variable import StateVar, TrainVar
from tether.errors import describe

__all__ = [
    "BatchNorm",
    "BatchNorm0D",
    "BatchNorm1D",
    "BatchNorm2D",
    "Conv2D",
    "ConvTranspose2D",
    "Dropout",
    "ExponentialMovingAverage",
    "GroupNorm",
    "GroupNorm0D",
    "GroupNorm1D",
    "GroupNorm2D",
    "Linear",
    "MovingAverage",
    "Sequential",
    "SyncedBatchNorm",
    "SyncedBatchNorm0D",
    "SyncedBatchNorm1D",
    "SyncedBatchNorm2D",
]

_LAYOUT = ("NCHW", "HWIO", "NCHW")


class Linear(Module):
    """A matrix times the last axis, plus a bias.

    Args:
        nin: Number of inputs.
        nout: Number of outputs.
        use_bias: Whether a bias is added.
        w_init: Makes the matrix, from its shape.
    Variables:
        b: TrainVar, float[nout]; or None.
        w: TrainVar, float[nin, nout].
    Shapes:
        x: float[..., nin] -> float[..., nout]
    Raises:
        MisuseError: the last axis of x is not nin.
    Example:
        >>> objax.nn.Linear(2, 3)(jnp.ones((4, 2))).shape
        (4, 3)
    """

    def __init__(self, nin: int, nout: int, use_bias: bool = True, w_init: Callable[..., Any] = xavier_normal):
        self.w_init = w_init
        self.b = TrainVar(jnp.zeros(nout)) if use_bias else None
        self.w = TrainVar(w_init((nin, nout)))

    def __call__(self, x: Any) -> jax.Array:
        """The outputs."""
        x = jnp.asarray(x)
        nin = self.w.shape[0]
        if x.shape[-1:] != (nin,):
            raise MisuseError(
                f"Linear: the last axis of x is not nin, {nin}.",
                got=describe(x),
                expected=f"[..., {nin}]",
                fix="objax.functional.flatten(x), for images" if x.ndim > 2 else None,
            )
        return _with_bias(jnp.dot(x, self.w.value), self.b)

    def __repr__(self) -> str:
        nin, nout = self.w.shape
        arguments = f"nin={nin}, nout={nout}, use_bias={self.b is not None}, w_init={repr_function(self.w_init)}"
        return f"{class_name(self)}({arguments})"


def _with_bias(y: jax.Array, b: TrainVar | None) -> jax.Array:
    return y if b is None else y + jnp.broadcast_to(b.value, y.shape)


class Conv2D(Module):
    """A convolution of images (a cross-correlation, as the field has it).

    Args:
        nin: Number of channels of the input.
        nout: Number of channels of the output.
        k: Size of the kernel: a number, or height and width. So are strides and dilations.
        strides: Steps of the kernel.
        dilations: Steps in the kernel.
        groups: Into how many parts the channels go, each with its own kernels.
        padding: A ConvPadding or its name, a number, a pair for both axes, or a pair for each.
        use_bias: Whether a bias is added.
        w_init: Makes the kernel, from its shape.
    Variables:
        b: TrainVar, float[nout, 1, 1]; or None.
        w: TrainVar, float[height, width, nin / groups, nout].
    Shapes:
        x: float[batch, nin, height, width] -> float[batch, nout, height', width']
    Raises:
        MisuseError: groups don't divide the channels; numbers below 1; x of another rank, number of channels or dtype.
    Example:
        >>> objax.nn.Conv2D(3, 8, 3, strides=2)(jnp.ones((1, 3, 8, 8))).shape
        (1, 8, 4, 4)
    """

    def __init__(
        self,
        nin: int,
        nout: int,
        k: Any,
        strides: Any = 1,
        dilations: Any = 1,
        groups: int = 1,
        padding: Any = ConvPadding.SAME,
        use_bias: bool = True,
        w_init: Callable[..., Any] = kaiming_normal,
    ):
        name = type(self).__name__
        for channels, number in {"nin": nin, "nout": nout}.items():
            if groups < 1 or number % groups:
                raise MisuseError(
                    f"{name}: {channels} should be divisible by groups.",
                    got=f"{channels}={number}, groups={groups}",
                    expected=f"{channels} a multiple of groups",
                )
        self.b = TrainVar(jnp.zeros((nout, 1, 1))) if use_bias else None
        self.w = TrainVar(w_init((*pair(name, "k", k), nin // groups, nout)))
        self.padding = to_padding(padding, 2)
        self.strides = pair(name, "strides", strides)
        self.dilations = pair(name, "dilations", dilations)
        self.groups = groups
        self.w_init = w_init

    def __call__(self, x: Any) -> jax.Array:
        """The convolved images."""
        w = self.w.value
        x = _convolvable(self, x, w.shape[2] * self.groups)
        y = lax.conv_general_dilated(
            x,
            w,
            self.strides,
            self.padding,
            rhs_dilation=self.dilations,
            feature_group_count=self.groups,
            dimension_numbers=_LAYOUT,
        )
        return _with_bias(y, self.b)

    def __repr__(self) -> str:
        height, width, nin, nout = self.w.shape
        arguments = {"nin": nin * self.groups, "nout": nout, "k": (height, width), "strides": self.strides}
        arguments |= {"dilations": self.dilations, "groups": self.groups}
        return _conv_repr(self, arguments)


class ConvTranspose2D(Conv2D):
    """The transpose of a convolution of images, as Keras has it, and not as PyTorch: see padding and kernel.

    Args:
        nin: Number of channels of the input.
        nout: Number of channels of the output.
        k: Size of the kernel: a number, or height and width. So are strides and dilations.
        strides: Steps from pixel to pixel of the input, in the output.
        dilations: Steps in the kernel.
        padding: A ConvPadding or its name (SAME: the output is strides times as large), or how the input is padded,
            once its pixels are strides apart: a number, a pair for both axes, or a pair for each.
        use_bias: Whether a bias is added.
        w_init: Makes the kernel, from its shape.
    Variables:
        b: TrainVar, float[nout, 1, 1]; or None.
        w: TrainVar, float[height, width, nout, nin].
    Shapes:
        x: float[batch, nin, height, width] -> float[batch, nout, height', width']
    Raises:
        MisuseError: numbers below 1; x of another rank, number of channels or dtype.
    Example:
        >>> objax.nn.ConvTranspose2D(3, 8, 3, strides=2)(jnp.ones((1, 3, 8, 8))).shape
        (1, 8, 16, 16)
    """

    def __init__(
        self,
        nin: int,
        nout: int,
        k: Any,
        strides: Any = 1,
        dilations: Any = 1,
        padding: Any = ConvPadding.SAME,
        use_bias: bool = True,
        w_init: Callable[..., Any] = kaiming_normal,
    ):
        super().__init__(nout, nin, k, strides, dilations, padding=padding, use_bias=False, w_init=w_init)
        self.b = TrainVar(jnp.zeros((nout, 1, 1))) if use_bias else None

    def __call__(self, x: Any) -> jax.Array:
        """The convolved images."""
        w = self.w.value
        x = _convolvable(self, x, w.shape[3])
        y = lax.conv_transpose(
            x,
            w,
            self.strides,
            self.padding,
            rhs_dilation=self.dilations,
            dimension_numbers=_LAYOUT,
            transpose_kernel=True,
        )
        return _with_bias(y, self.b)

    def __repr__(self) -> str:
        height, width, nout, nin = self.w.shape
        arguments = {"nin": nin, "nout": nout, "k": (height, width), "strides": self.strides}
        return _conv_repr(self, arguments | {"dilations": self.dilations})


def _convolvable(conv: Conv2D, x: Any, nin: int) -> jax.Array:
    name = type(conv).__name__
    x = images(name, x, nin)
    if x.shape[1] != nin:
        raise MisuseError(
            f"{name}: Attempting to convolve an input with {x.shape[1]} input channels when the convolution expects "
            f"{nin} channels.",
            got=describe(x),
            expected=f"[batch, {nin}, height, width]",
            fix="objax.util.image.nchw(x)" if x.shape[3] == nin else None,
        )
    if x.dtype != conv.w.dtype:
        raise MisuseError(
            f"{name}: the input and the kernel differ in dtype.",
            got=describe(x),
            expected=str(conv.w.dtype),
            fix=f"x.astype('{conv.w.dtype}')",
        )
    return x


def _conv_repr(conv: Conv2D, arguments: dict[str, Any]) -> str:
    arguments = arguments | {"padding": conv.padding, "use_bias": conv.b is not None}
    text = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
    return f"{class_name(conv)}({text}, w_init={repr_function(conv.w_init)})"


class Dropout(Module):
    """When training, makes elements 0, and the others larger in return.

    Args:
        keep: The probability with which an element is kept, in [0, 1].
        generator: Where the keys come from.
    Raises:
        MisuseError: keep is no probability.
    Example:
        >>> objax.nn.Dropout(0.5)(jnp.ones(3), training=False).tolist()
        [1.0, 1.0, 1.0]
    References:
        Hinton et al. 2012, arXiv:1207.0580.
    """

    def __init__(self, keep: float, generator: random.Generator = random.DEFAULT_GENERATOR):
        self.keygen = generator
        self.keep = _checked_keep("keep", keep)

    def __call__(self, x: Any, training: bool, dropout_keep: float | None = None) -> jax.Array:
        """The input, or what is kept of it.

        Args:
            x: float[...].
            training: Whether anything is dropped.
            dropout_keep: In place of ``keep``; None and 0 leave that as it is.
        """
        keep = _checked_keep("dropout_keep", dropout_keep) if dropout_keep else self.keep
        if not training or keep >= 1:
            return x
        x = jnp.asarray(x)
        kept = jax.random.bernoulli(self.keygen(), keep, x.shape)
        return jnp.where(kept, x / (keep or 1), 0)  # at 0 nothing is kept, and the gradient is 0 as well

    def __repr__(self) -> str:
        return f"{class_name(self)}(keep={self.keep})"


def _checked_keep(name: str, keep: Any) -> Any:
    if not 0 <= keep <= 1:
        raise MisuseError(
            f"Dropout: {name} is no probability.",
            got=f"{name}={keep}",
            expected="a number from 0 to 1",
            fix=f"{name}={keep / 100}, for percent" if 1 < keep <= 100 else None,
        )
    return keep


class ExponentialMovingAverage(Module):
    """An average in which older inputs count ever less.

    avg = momentum * avg + (1 - momentum) * x

    Args:
        shape: Of an input.
        momentum: Weight of the old average.
        init_value: The average before the first input.
    Variables:
        avg: StateVar, float[shape]; written.
    Raises:
        MisuseError: an input of another shape.
    Example:
        >>> average = objax.nn.ExponentialMovingAverage((), momentum=0.5)
        >>> [float(average(jnp.array(8.0))) for _ in range(3)]
        [4.0, 6.0, 7.0]
    """

    def __init__(self, shape: Sequence[int], momentum: float = 0.999, init_value: float = 0):
        self.momentum = momentum
        self.init_value = init_value
        self.avg = StateVar(jnp.zeros(shape) + init_value)

    def __call__(self, x: Any) -> jax.Array:
        """The average, this input included."""
        x = _averaged(self, x, self.avg.shape)
        self.avg.value += (self.avg.value - x) * (self.momentum - 1)
        return self.avg.value

    def __repr__(self) -> str:
        arguments = f"shape={self.avg.shape}, momentum={self.momentum}, init_value={self.init_value}"
        return f"{class_name(self)}({arguments})"


class MovingAverage(Module):
    """The average of the last inputs.

    Args:
        shape: Of an input.
        buffer_size: Number of inputs.
        init_value: What those are that came before the first.
    Variables:
        buffer: StateVar, float[buffer_size, *shape]; written.
    Raises:
        MisuseError: no room for an input, or an input of another shape.
    Example:
        >>> average = objax.nn.MovingAverage((), buffer_size=2)
        >>> [float(average(jnp.array(x))) for x in (2.0, 4.0, 8.0)]
        [1.0, 3.0, 6.0]
    """

    def __init__(self, shape: Sequence[int], buffer_size: int, init_value: float = 0):
        if buffer_size < 1:
            raise MisuseError(
                "MovingAverage: buffer_size is below 1.", got=f"buffer_size={buffer_size}", expected="1 or more"
            )
        self.init_value = init_value
        self.buffer = StateVar(jnp.zeros((buffer_size, *shape)) + init_value)

    def __call__(self, x: Any) -> jax.Array:
        """The average, this input included."""
        x = _averaged(self, x, self.buffer.shape[1:])
        self.buffer.value = jnp.concatenate([self.buffer.value[1:], x[None]])
        return self.buffer.value.mean(0)

    def __repr__(self) -> str:
        size, *shape = self.buffer.shape
        return f"{class_name(self)}(shape={tuple(shape)}, buffer_size={size}, init_value={self.init_value})"


def _averaged(average: Module, x: Any, shape: tuple[int, ...]) -> jax.Array:
    x = jnp.asarray(x)
    if x.shape != shape:
        raise MisuseError(
            f"{type(average).__name__}: the input isn't of the shape that is averaged.",
            got=describe(x),
            expected=f"[{', '.join(map(str, shape))}]",
            fix=f"{type(average).__name__}({x.shape}, ...)",
        )
    return x
