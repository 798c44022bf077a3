# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding. Apart from attention, since it is of use to any pair of vectors that meet in a product."""

from __future__ import annotations

from numbers import Real
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from tether._modules import Module
from tether.errors import ArgumentError, DtypeError, ShapeError, describe
from tether.nn._inputs import as_array, at_least_float32, computing_dtype, integer, name_of, real_only

_LAYOUTS = ("half", "interleaved")


class RotaryEmbedding(Module):
    """Turns pairs of features by angles that grow with the position.

    (a, b) -> (a cos t - b sin t, a sin t + b cos t), t = position * base^(-2 i / rotated) for pair i

    So the product of a turned query and a turned key depends on their distance alone. Which features make pair i is a
    convention of the model; weights trained with one are wrong with the other:

    - ``"half"``: i and i + rotated / 2, as in GPT-NeoX, Equinox, and LLaMA as Hugging Face stores it;
    - ``"interleaved"``: 2 i and 2 i + 1, as in the paper, GPT-J, and LLaMA as Meta stores it.

    Angles, and the turn, are computed in float32 or wider.

    Args:
        size: Size of the last axis of x, at least 2.
        base: Wavelength of the slowest pair, in positions over 2 pi, about; above 0.
        layout: "half" or "interleaved".
        rotated: The first so many features are turned, an even number; the others pass. None is size.
    Shapes:
        x: float[..., length, size] -> float[..., length, size]
        positions: int or float[..., length], each axis 1 or as in x; missing leading axes are shared. None counts
            from 0.
    Raises:
        ShapeError: the last axis of x is not size, or positions don't fit x.
        DtypeError: x or positions are not real numbers.
        ArgumentError: an odd number of features to turn, or an option out of its range.
    Example:
        >>> y = nn.RotaryEmbedding(2)(jnp.ones((2, 2)))
        >>> [[round(value, 3) for value in row] for row in y.tolist()]
        [[1.0, 1.0], [-0.301, 1.382]]
    References:
        Su et al. 2021, arXiv:2104.09864, section 3.2.2.
    """

    def __init__(
        self,
        size: int,
        *,
        base: float = 10000.0,
        layout: Literal["half", "interleaved"] = "half",
        rotated: int | None = None,
    ):
        name = name_of(self)
        self.size = integer(name, "size", size, least=2)
        self.base = _base(name, base)
        self.layout = _layout(name, layout)
        self.rotated = _rotated(name, self.size if rotated is None else rotated, self.size)
        self.compute_dtype = None

    def __call__(self, x: ArrayLike, positions: ArrayLike | None = None) -> jax.Array:
        x = as_array(self, x)
        real_only(self, x)
        if x.ndim < 2 or x.shape[-1] != self.size:
            raise ShapeError(
                f"{name_of(self)}: x doesn't end in a length and the size, {self.size}.",
                got=describe(x),
                expected=f"[..., length, {self.size}]",
                fix=f"nn.{name_of(self)}(x.shape[-1]); x[None] for a single position",
            )
        positions = jnp.arange(x.shape[-2]) if positions is None else self._checked(positions, x)
        dtype = computing_dtype(self, x)
        wide = at_least_float32(dtype)
        turned, passed = x[..., : self.rotated].astype(wide), x[..., self.rotated :].astype(dtype)
        turned = _turn(turned, self._angles(positions, wide), self.layout).astype(dtype)
        return jnp.concatenate([turned, passed], -1) if passed.shape[-1] else turned

    def _angles(self, positions: jax.Array, dtype: jnp.dtype) -> jax.Array:
        """The angles of all pairs, [..., length, rotated / 2]."""
        pairs = np.arange(0, self.rotated, 2)
        frequencies = jnp.asarray(self.base ** (-pairs / self.rotated), dtype)
        with jax.numpy_rank_promotion("allow"):
            return positions.astype(dtype)[..., None] * frequencies

    def _checked(self, positions: ArrayLike, x: jax.Array) -> jax.Array:
        positions, sizes = as_array(self, positions), x.shape[:-1]
        if jnp.issubdtype(positions.dtype, jnp.complexfloating) or positions.dtype == jnp.bool_:
            raise DtypeError(
                f"{name_of(self)}: positions are not real numbers.",
                got=describe(positions),
                expected="an array of integers, or of floats",
                fix="jnp.arange(x.shape[-2])",
            )
        fits = zip(positions.shape[::-1], sizes[::-1], strict=False)
        if not 1 <= positions.ndim <= len(sizes) or any(own not in (1, size) for own, size in fits):
            raise ShapeError(
                f"{name_of(self)}: positions don't fit x.",
                got=f"positions {describe(positions)}, x {describe(x)}",
                expected=f"[{sizes[-1]}], or [{', '.join(map(str, sizes))}] with axes of 1 for what is shared",
                fix="positions[:, None] for one position for each example of a batch",
            )
        return positions


def _turn(x: jax.Array, angles: jax.Array, layout: str) -> jax.Array:
    half, pair = x.shape[-1] // 2, -1 if layout == "interleaved" else -2
    a, b = jnp.moveaxis(x.reshape((*x.shape[:-1], *((half, 2) if pair == -1 else (2, half)))), pair, 0)
    with jax.numpy_rank_promotion("allow"):
        cos, sin = jnp.cos(angles), jnp.sin(angles)
        return jnp.stack([a * cos - b * sin, a * sin + b * cos], pair).reshape(x.shape)


def _rotated(name: str, rotated: int, size: int) -> int:
    rotated = integer(name, "rotated", rotated, least=2)
    if rotated % 2 or rotated > size:
        raise ArgumentError(
            f"{name}: {rotated} of {size} features can't be turned in pairs.",
            got=f"size={size}, rotated={rotated}",
            expected=f"an even number of at most {size}",
            fix=f"rotated={min(rotated, size) // 2 * 2}",
        )
    return rotated


def _layout(name: str, layout: str) -> str:
    if layout not in _LAYOUTS:
        raise ArgumentError(
            f"{name}: layout is a word that means nothing here.",
            got=f"layout={describe(layout)}",
            expected="'half' (feature i with i + size / 2) or 'interleaved' (2 i with 2 i + 1)",
            fix=["layout='half'", "layout='interleaved'"],
        )
    return layout


def _base(name: str, base: float) -> float:
    if isinstance(base, bool) or not isinstance(base, Real) or not 0 < base < float("inf"):
        raise ArgumentError(
            f"{name}: base is not a positive number.",
            got=f"base={describe(base)}",
            expected="a float > 0",
            fix="base=10000.0",
        )
    return float(base)
