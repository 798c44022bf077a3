# SPDX-License-Identifier: Apache-2.0
"""How convolutions and pooling spell a window: kernel, stride, padding, dilation, one number or one for each axis.

Padding is an int, one int for each axis (both sides), one pair for each axis (before, after), or a word in any case:
``"VALID"``, ``"SAME"``, ``"SAME_LOWER"`` with JAX's meaning (``SAME`` gives ceil(size / stride) outputs), and
``"CAUSAL"``, all before, so that output t sees no input after t * stride.

The extent of a window is (kernel_size - 1) * dilation + 1, the elements from its first to its last.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tether._modules import Module
from tether.errors import ArgumentError, ShapeError, describe
from tether.nn._inputs import integer, name_of

Pairs = tuple[tuple[int, int], ...]
WORDS = ("SAME", "SAME_LOWER", "VALID", "CAUSAL")
# PyTorch's and Equinox's words for what lies beyond the edge -> those of jnp.pad.
_MODES = {"zeros": "constant", "reflect": "reflect", "replicate": "edge", "circular": "wrap"}


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


def padding_per_axis(name: str, value: Any, axes: int, words: tuple[str, ...] = WORDS) -> str | Pairs:
    """Reads a padding as one pair for each space axis, or as one of the words in capitals."""
    if isinstance(value, str):
        if value.upper() not in words:
            mode = value.lower() in _MODES and words == WORDS
            raise ArgumentError(
                f"{name}: padding is a word that means nothing here.",
                got=f"padding={value!r}",
                expected=f"{', '.join(map(repr, words))}, or numbers",
                fix=f"padding='SAME', padding_mode={value.lower()!r}" if mode else "padding='SAME'",
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


def mode_of_padding(name: str, value: str, padding: str | Pairs) -> str:
    """Reads what the padding is filled with, in small letters."""
    mode = value.lower() if isinstance(value, str) else None
    if mode not in _MODES:
        raise ArgumentError(
            f"{name}: padding_mode is none that there is.",
            got=f"padding_mode={describe(value)}",
            expected="one of " + ", ".join(map(repr, _MODES)),
            fix="padding_mode='zeros'",
        )
    if padding == "CAUSAL" and mode in ("reflect", "circular"):
        raise ArgumentError(
            f"{name}: padding_mode {mode!r} puts later elements before the first, which is not causal.",
            got=f"padding='CAUSAL', padding_mode={value!r}",
            expected="padding_mode 'zeros' or 'replicate' with padding 'CAUSAL'",
            fix=["padding_mode='replicate'", "padding='SAME'"],
        )
    return mode


def extent_of(kernel: tuple[int, ...], dilation: tuple[int, ...]) -> tuple[int, ...]:
    """Counts the elements of each axis from the first of a window to its last."""
    return tuple((k - 1) * d + 1 for k, d in zip(kernel, dilation, strict=True))


def explicit_padding(
    sizes: tuple[int, ...], extent: tuple[int, ...], stride: tuple[int, ...], padding: str | Pairs
) -> Pairs:
    """Turns the padding into pairs for space axes of these sizes."""
    if padding == "CAUSAL":
        return tuple((each - 1, 0) for each in extent)
    return tuple(lax.padtype_to_pads(sizes, extent, stride, padding)) if isinstance(padding, str) else padding


def check_fit(module: Module, x: jax.Array, extent: tuple[int, ...], pairs: Pairs) -> None:
    """Refuses an input that no window fits into; JAX would answer with an empty array."""
    sizes = x.shape[-len(extent) :]
    if any(size + before + after < each for size, each, (before, after) in zip(sizes, extent, pairs, strict=True)):
        raise ShapeError(
            f"{name_of(module)}: the window is larger than the padded input.",
            got=f"{describe(x)}, window {extent}, padding {pairs}",
            expected=f"space axes of at least {tuple(k - a - b for k, (a, b) in zip(extent, pairs, strict=True))}",
            fix=["a larger input", "padding='SAME'", "a smaller kernel_size"],
        )


def pad(module: Module, x: jax.Array, pairs: Pairs, mode: str) -> jax.Array:
    """Pads the space axes with elements of x itself."""
    sizes = x.shape[-len(pairs) :]
    if mode == "reflect" and any(max(pair) >= size for pair, size in zip(pairs, sizes, strict=True)):
        raise ShapeError(
            f"{name_of(module)}: x has too few elements to be reflected this far.",
            got=f"{describe(x)}, padding {pairs}",
            expected=f"space axes of at least {tuple(max(pair) + 1 for pair in pairs)}",
            fix=["padding_mode='replicate'", "less padding: a smaller kernel_size or dilation"],
        )
    return jnp.pad(x, ((0, 0),) * (x.ndim - len(pairs)) + pairs, mode=_MODES[mode])


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
    if 0 in x.shape[-axes:]:
        raise ShapeError(
            f"{name_of(module)}: a space axis of x is empty.",
            got=describe(x),
            expected=f"{right}, space axes of at least 1",
            fix="leave examples without an element out of the batch",
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


def take_windows(x: jax.Array, axis: int, places: np.ndarray) -> jax.Array:
    """Puts windows in the place of an axis, counted from 0: [..., size, ...] -> [..., windows, elements, ...]."""
    if np.array_equal(places.ravel(), np.arange(x.shape[axis])):  # side by side: nothing needs to be gathered
        return x.reshape(x.shape[:axis] + places.shape + x.shape[axis + 1 :])
    return jnp.take(x, places, axis, mode="clip")


def first_best(x: jax.Array, axis: int, places: np.ndarray, best: Callable[..., jax.Array]) -> jax.Array:
    """Takes the best element of each window of one axis; of equal ones the first, which then has all of the gradient.

    An axis after the other, from the last on, that is the first in the order of rows, as in PyTorch.

    Args:
        x: Array.
        axis: Of x, from 0.
        places: int[windows, elements], where each window has its elements. A shorter window names one of its own twice.
        best: ``jnp.argmax`` or ``jnp.argmin``.
    """
    windows = take_windows(x, axis, places)
    chosen = best(windows, axis=axis + 1, keepdims=True)
    return jnp.take_along_axis(windows, chosen, axis + 1, mode="clip").squeeze(axis + 1)
