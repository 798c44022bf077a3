# SPDX-License-Identifier: Apache-2.0
"""How convolutions and pooling spell a window: kernel, stride, padding, dilation, one number or one for each axis.

Padding is an int, one int for each axis (both sides), one pair for each axis (before, after), or ``"VALID"``,
``"SAME"``, ``"SAME_LOWER"`` in any case, with JAX's meaning (``SAME`` gives ceil(size / stride) outputs).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax

from tether._modules import Module
from tether.errors import ArgumentError, ShapeError, describe
from tether.nn._inputs import integer, name_of

Pairs = tuple[tuple[int, int], ...]
_WORDS = ("SAME", "SAME_LOWER", "VALID")


def per_axis(name: str, argument: str, value: int | Sequence[int], axes: int, least: int = 1) -> tuple[int, ...]:
    """Reads one int for all space axes, or one for each."""
    if not isinstance(value, list | tuple):
        return (integer(name, argument, value, least),) * axes
    if len(value) != axes:
        pairs = f"; a pair for each axis is ({'(before, after), ' * axes}".rstrip(" ") + ")"
        raise ArgumentError(
            f"{name}: {argument} has {len(value)} numbers for {axes} space axes.",
            got=f"{argument}={value!r}",
            expected=f"an int, or {axes} of them{pairs if argument == 'padding' else ''}",
            fix=f"{argument}={(least,) * axes}",
        )
    return tuple(integer(name, argument, number, least) for number in value)


def padding_per_axis(name: str, value: Any, axes: int) -> str | Pairs:
    """Reads a padding as one pair for each space axis, or as one of JAX's words in capitals."""
    if isinstance(value, str):
        if value.upper() not in _WORDS:
            raise ArgumentError(
                f"{name}: padding is a word that means nothing here.",
                got=f"padding={value!r}",
                expected="'SAME', 'SAME_LOWER', 'VALID', or numbers",
                fix="padding='SAME'",
            )
        return value.upper()
    if isinstance(value, list | tuple) and len(value) == axes and all(isinstance(side, list | tuple) for side in value):
        return tuple(_pair(name, side) for side in value)
    return tuple((side, side) for side in per_axis(name, "padding", value, axes, least=0))


def _pair(name: str, sides: Sequence[int]) -> tuple[int, int]:
    if len(sides) != 2:
        raise ArgumentError(
            f"{name}: padding is not two numbers for an axis.",
            got=f"{sides!r} for one axis",
            expected="(before, after)",
            fix="padding=((1, 1), (1, 1)) for two axes",
        )
    before, after = (integer(name, "padding", side, least=0) for side in sides)
    return before, after


def explicit_padding(
    module: Module, x: jax.Array, kernel: tuple[int, ...], stride: tuple[int, ...], padding: str | Pairs
) -> Pairs:
    """Turns the padding into pairs for this input, and refuses an input that no window fits into.

    JAX would answer with an empty array. ``kernel`` is the extent of the window, dilation included.
    """
    sizes = x.shape[-len(kernel) :]
    pairs = tuple(lax.padtype_to_pads(sizes, kernel, stride, padding)) if isinstance(padding, str) else padding
    if any(size + before + after < extent for size, extent, (before, after) in zip(sizes, kernel, pairs, strict=True)):
        raise ShapeError(
            f"{name_of(module)}: the window is larger than the padded input.",
            got=f"{describe(x)}, window {kernel}, padding {pairs}",
            expected=f"space axes of at least {tuple(k - a - b for k, (a, b) in zip(kernel, pairs, strict=True))}",
            fix=["a larger input", "padding='SAME'", "a smaller kernel_size"],
        )
    return pairs


def check_rank(module: Module, x: jax.Array, axes: int, channels: int | None = None) -> None:
    """Checks that x ends in channels and the space axes; any number of batch axes may lead."""
    count = "channels" if channels is None else channels
    right = f"[..., {count}, {', '.join('DHW'[-axes:]) if axes > 1 else 'L'}]"
    if x.ndim < axes + 1:
        raise ShapeError(
            f"{name_of(module)}: x has {x.ndim} axes, one example has {axes + 1}.",
            got=describe(x),
            expected=right,
            fix="x[None] adds the axis of a single channel",
        )
    if channels is not None and x.shape[-axes - 1] != channels:
        raise ShapeError(
            f"{name_of(module)}: axis {-axes - 1} of x has {x.shape[-axes - 1]} channels, not {channels}.",
            got=describe(x),
            expected=right,
            fix=["in_channels as the input has them", f"jnp.moveaxis(x, -1, {-axes - 1}) if x is channels last"],
        )


def join_leading(x: jax.Array, rank: int) -> tuple[jax.Array, tuple[int, ...]]:
    """Joins all axes before the last ``rank`` into one batch axis; gives the leading axes for the way back."""
    leading = x.shape[: x.ndim - rank]
    if len(leading) == 1:
        return x, leading
    return x.reshape((math.prod(leading), *x.shape[x.ndim - rank :])), leading


def part_leading(y: jax.Array, leading: tuple[int, ...]) -> jax.Array:
    """Undoes ``join_leading`` on an output."""
    return y if len(leading) == 1 else y.reshape(leading + y.shape[1:])
