# SPDX-License-Identifier: Apache-2.0
"""Operations on arrays.

| Objax | here | what differs |
| --- | --- | --- |
| dynamic_slice, rsqrt, stop_gradient, top_k | ``jax.lax`` | variables as arguments are their values |
| one_hot | ``jax.nn.one_hot`` | nothing |
| pad | ``jnp.pad`` | its arguments have names; ``jnp.pad`` itself is left as it is |
| scan | ``tether.scan`` | variables that the body writes, random states too, go from turn to turn |
| interpolate, upsample_2d | ``jax.image.resize`` | lists as sizes, too; errors in words |
| flatten, upscale_nn | ``jnp`` | errors in words |
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tether._transforms import scan as tether_scan
from tether.compat.objax._errors import MisuseError
from tether.compat.objax._names import known_as
from tether.compat.objax.constants import Interpolate
from tether.compat.objax.functional.core._inputs import images, pair
from tether.compat.objax.random import DEFAULT_GENERATOR
from tether.compat.objax.util import re_sign, to_interpolate
from tether.compat.objax.variable import unwrapped
from tether.errors import describe

__all__ = [
    "dynamic_slice",
    "flatten",
    "interpolate",
    "one_hot",
    "pad",
    "rsqrt",
    "scan",
    "stop_gradient",
    "top_k",
    "upsample_2d",
    "upscale_nn",
]

one_hot = jax.nn.one_hot


def dynamic_slice(operand: Any, start_indices: Any, slice_sizes: Sequence[int]) -> jax.Array:
    """The part of an array that begins at some indices, which may be traced, as ``lax.dynamic_slice``.

    Args:
        operand: An array.
        start_indices: One for each axis.
        slice_sizes: One for each axis.
    """
    return lax.dynamic_slice(jnp.asarray(operand), unwrapped(start_indices), slice_sizes)


def rsqrt(x: Any) -> jax.Array:
    """1 / sqrt(x)."""
    return lax.rsqrt(jnp.asarray(x))


def stop_gradient(x: Any) -> Any:
    """The same array, or tree of arrays, as a constant for gradients."""
    return lax.stop_gradient(unwrapped(x))


@re_sign(tether_scan)
def scan(f: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Runs ``carry, y = f(carry, x)`` for each ``x`` in turn, and stacks the ``y``, as ``lax.scan``.

    Args:
        f: The body.
        *args: ``init, xs=None, length=None, reverse=False, unroll=1``, as of ``lax.scan``.
        **kwargs: Those by name.
    """
    return tether_scan(known_as(f, functools.partial(_turn, DEFAULT_GENERATOR, f)), *args, **kwargs)


def _turn(_: Any, f: Callable[..., Any], carry: Any, x: Any) -> Any:
    return f(carry, x)  # the first argument is there to be found


def top_k(operand: Any, k: int) -> Any:
    """The k largest along the last axis, and where they are."""
    return lax.top_k(jnp.asarray(operand), k)


def _pad(
    array: Any,
    pad_width: Any,
    mode: Any = "constant",
    *,
    stat_length: Any = None,
    constant_values: Any = 0,
    end_values: Any = None,
    reflect_type: Any = None,
) -> jax.Array:
    raise NotImplementedError  # a signature only: jnp.pad takes those that go with the mode, and no other


@re_sign(_pad)
def pad(*args: Any, **kwargs: Any) -> jax.Array:
    """Pads an array, as ``jnp.pad`` does.

    Its signature has names, so that ``nn.Sequential`` keeps from it what is meant for other layers.
    """
    return jnp.pad(*args, **kwargs)


def flatten(x: Any) -> jax.Array:
    """All axes but the first as one.

    Raises:
        MisuseError: x is a scalar.
    Example:
        >>> objax.functional.flatten(jnp.ones((5, 2, 3))).shape
        (5, 6)
    """
    x = jnp.asarray(x)
    if not x.ndim:
        raise MisuseError("flatten: x has no axis of a batch.", got=describe(x), expected="[batch, ...]")
    return x.reshape(x.shape[0], math.prod(x.shape[1:]))


def interpolate(
    input: Any, size: Any = None, scale_factor: Any = None, mode: Interpolate | str = Interpolate.BILINEAR
) -> jax.Array:
    """An array resized, to a size or by a factor.

    Args:
        input: An array.
        size: Of the trailing axes; a number is of the last one.
        scale_factor: Of the trailing axes, whole numbers; one number is of all axes but the first.
        mode: An Interpolate, or its name.
    Raises:
        MisuseError: not one of size and scale_factor, or more numbers than there are axes, or none above 0.
    Example:
        >>> objax.functional.interpolate(jnp.ones((1, 2, 4)), size=(3, 8)).shape
        (1, 3, 8)
    """
    x = jnp.asarray(input)
    if bool(size) == bool(scale_factor):
        raise MisuseError(
            f"interpolate: {'both' if size else 'neither'} of size and scale_factor are given.",
            got=f"size={size!r}, scale_factor={scale_factor!r}",
            expected="one of the two",
        )
    if size:
        sizes = _trailing(x, "size", [size] if _is_number(size) else size)
    else:
        factors = [scale_factor] * (x.ndim - 1) if _is_number(scale_factor) else scale_factor
        factors = _trailing(x, "scale_factor", factors)
        sizes = [length * factor for length, factor in zip(x.shape[x.ndim - len(factors) :], factors, strict=True)]
    return jax.image.resize(x, (*x.shape[: x.ndim - len(sizes)], *sizes), to_interpolate(mode))


def _is_number(value: Any) -> bool:
    return not isinstance(value, list | tuple)


def _trailing(x: jax.Array, name: str, values: Any) -> list[int]:
    try:
        numbers = [operator.index(value) for value in values]
    except TypeError:
        numbers = []
    if not 0 < len(numbers) <= x.ndim or min(numbers) < 1:
        raise MisuseError(
            f"interpolate: {name} doesn't fit the axes of the input.",
            got=f"{name}={values!r}, for {describe(x)}",
            expected=f"at most {x.ndim} whole numbers above 0",
        )
    return numbers


def upsample_2d(x: Any, scale: Any, method: Interpolate | str = Interpolate.BILINEAR) -> jax.Array:
    """Images, enlarged.

    Args:
        x: Images, [batch, channels, height, width].
        scale: Whole factors of height and width; one number for both.
        method: An Interpolate, or its name.
    Raises:
        MisuseError: x isn't of rank 4, or scale isn't one or two numbers above 0.
    Example:
        >>> objax.functional.upsample_2d(jnp.ones((1, 3, 4, 5)), (2, 3)).shape
        (1, 3, 8, 15)
    """
    return interpolate(images("upsample_2d", x), scale_factor=pair("upsample_2d", "scale", scale), mode=method)


def upscale_nn(x: Any, scale: int = 2) -> jax.Array:
    """Images, each pixel repeated in height and width.

    Args:
        x: Images, [batch, channels, height, width].
        scale: How often.
    Raises:
        MisuseError: x isn't of rank 4.
    Example:
        >>> objax.functional.upscale_nn(jnp.arange(2.0).reshape(1, 1, 1, 2)).tolist()
        [[[[0.0, 0.0, 1.0, 1.0], [0.0, 0.0, 1.0, 1.0]]]]
    """
    return jnp.repeat(jnp.repeat(images("upscale_nn", x), scale, axis=2), scale, axis=3)
