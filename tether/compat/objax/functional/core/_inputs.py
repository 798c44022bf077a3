# SPDX-License-Identifier: Apache-2.0
"""What functions of images ask of their arguments.

| Objax | here | what differs |
| --- | --- | --- |
| asserts, and errors of reshapes | MisuseError | says what was given and what is expected |
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from tether.compat.objax._errors import MisuseError
from tether.compat.objax.util import to_tuple
from tether.errors import describe


def images(name: str, x: Any, channels: str | int = "channels") -> jax.Array:
    """A batch of images, [batch, channels, height, width]."""
    x = jnp.asarray(x)
    if x.ndim != 4:
        raise MisuseError(
            f"{name}: x is no batch of images, which has 4 dimensions.",
            got=describe(x),
            expected=f"[batch, {channels}, height, width]",
            fix="x[None], for one image" if x.ndim == 3 else None,
        )
    return x


def pair(name: str, argument: str, value: Any) -> tuple[int, int]:
    """Two whole numbers above 0, for height and width; of one, the same for both."""
    numbers = to_tuple(value, 2)
    if len(numbers) != 2 or min(numbers) < 1:
        raise MisuseError(
            f"{name}: {argument} is neither a number above 0 nor two of them.",
            got=f"{argument}={value!r}",
            expected=f"{argument}=2, or {argument}=(2, 3) for height and width",
        )
    return numbers


def divided(name: str, what: str, x: jax.Array, number: int, by: int) -> int:
    """A length divided by another, without rest."""
    if number % by:
        raise MisuseError(
            f"{name}: {what}, {number}, is no multiple of {by}.",
            got=describe(x),
            expected=f"a multiple of {by}",
            fix="another size, or an input cut or padded to such a multiple",
        )
    return number // by
