# SPDX-License-Identifier: Apache-2.0
"""Pooling: fixed, adaptive and global windows. Inputs called "with ties" are small whole numbers.

Options are Tether's; each library gets them in its own words. A case names the libraries that have all of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.parity.cases.conv import LIBRARIES, batched, mapped, padding, per_axis
from tests.parity.harness import Case, normal
from tether import nn


def axes_of(name: str, options: Any) -> int:
    return options["num_spatial_dims"] if name.startswith("Global") else int(name[-2])


def of_torch(name: str, options: Any, params: Any, states: Any, inputs: Any, training: bool) -> Any:
    import torch

    (x,), axes = inputs, axes_of(name, options)
    if name.startswith("Global"):
        layer = getattr(torch.nn, f"Adaptive{name[6:]}{axes}d")(1)
    else:
        layer = getattr(torch.nn, name)(**options)
    y = layer(batched(x, axes))
    y = y.reshape(x.shape[: x.ndim - axes - 1] + y.shape[1:])
    return y.reshape(x.shape[:-axes]) if name.startswith("Global") else y, {}


def of_flax(name: str, options: Any, params: Any, states: Any, inputs: Any, training: bool) -> Any:
    from flax import nnx

    (x,), axes = inputs, axes_of(name, options)
    window = per_axis(options, "kernel_size", axes)
    strides = per_axis(options, "stride", axes) if "stride" in options else window
    more = {"count_include_pad": options["count_include_pad"]} if "count_include_pad" in options else {}
    pool = getattr(nnx, f"{name[:3].lower()}_pool")
    # Flax 0.12.8 takes padding in numbers with one batch axis alone.
    y = pool(jnp.moveaxis(batched(x, axes), 1, -1), window, strides, padding(options, axes), **more)
    return jnp.moveaxis(y, -1, 1).reshape(x.shape[:-axes] + y.shape[1:-1]), {}


def of_equinox(name: str, options: Any, params: Any, states: Any, inputs: Any, training: bool) -> Any:
    import equinox as eqx

    (x,), axes = inputs, axes_of(name, options)
    if name.startswith("Adaptive"):
        return mapped(getattr(eqx.nn, name)(options["output_size"]), x, axes), {}
    if name.startswith("Global"):
        y = mapped(getattr(eqx.nn, f"Adaptive{name[6:]}{axes}d")(1), x, axes)
        return y.reshape(x.shape[:-axes]), {}
    given = (options["kernel_size"], options.get("stride", options["kernel_size"]), padding(options, axes))
    ceil = {"use_ceil": options.get("ceil_mode", False)}
    if name.startswith("Min"):
        return mapped(eqx.nn.Pool(jnp.inf, jax.lax.min, axes, *given, **ceil), x, axes), {}
    return mapped(getattr(eqx.nn, name)(*given, **ceil), x, axes), {}


def of_haiku(name: str, options: Any, params: Any, states: Any, inputs: Any, training: bool) -> Any:
    import haiku as hk

    (x,), axes = inputs, axes_of(name, options)
    lead = (1,) * (x.ndim - axes)
    window = per_axis(options, "kernel_size", axes)
    strides = per_axis(options, "stride", axes) if "stride" in options else window
    pool = {"Max": hk.max_pool, "Avg": hk.avg_pool}[name[:3]]
    return pool(x, lead + window, lead + strides, options.get("padding", "VALID"), None), {}


PEERS = {"t": of_torch, "f": of_flax, "e": of_equinox, "h": of_haiku}


def ties(shape: tuple[int, ...]) -> Callable[[np.random.Generator], tuple[np.ndarray]]:
    return lambda rng: (rng.integers(0, 3, shape).astype(np.float64),)


def case(letters: str, name: str, shape: tuple[int, ...], tied: bool = False, **options: Any) -> Case:
    """One case; a letter stands for each library that has all of the options."""
    make = functools.partial(getattr(nn, name), **options)
    setting = ", ".join(f"{option}={value!r}" for option, value in options.items())
    setting += ", 2 batch axes" if len(shape) > axes_of(name, options) + 2 else ""
    asked = {LIBRARIES[letter]: functools.partial(PEERS[letter], name, options) for letter in letters}
    inputs = ties(shape) if tied else normal(shape)
    return Case(name, setting + (", with ties" if tied else ""), make, inputs, asked, training=(True,))


CASES = [
    case("tfeh", "MaxPool1d", (2, 2, 3, 7), kernel_size=2),
    case("te", "MaxPool1d", (2, 2, 6), kernel_size=3, stride=2, ceil_mode=True),
    case("t", "MaxPool1d", (2, 2, 4), kernel_size=2, stride=3, padding=1, ceil_mode=True),
    case("tfe", "MaxPool2d", (1, 2, 5, 6), kernel_size=3, stride=2, padding=1),
    case("fh", "MaxPool2d", (1, 2, 5, 6), kernel_size=(3, 2), padding="SAME"),
    case("tfeh", "MaxPool2d", (1, 3, 5, 6), tied=True, kernel_size=(2, 3), stride=1),
    case("t", "MaxPool2d", (1, 2, 6, 7), tied=True, kernel_size=2, stride=(1, 2), padding=1, dilation=2),
    case("tfeh", "MaxPool3d", (2, 2, 2, 3, 4), kernel_size=2),
    case("t", "MaxPool3d", (1, 2, 3, 4, 5), kernel_size=2, padding=1, dilation=(1, 2, 3), ceil_mode=True),
    case("f", "MinPool1d", (2, 2, 3, 7), kernel_size=3, stride=2),
    case("fe", "MinPool2d", (1, 2, 5, 6), kernel_size=3, stride=2, padding=1),
    case("fe", "MinPool3d", (1, 2, 3, 3, 4), tied=True, kernel_size=2, stride=1),
    case("tfeh", "AvgPool1d", (2, 2, 3, 7), kernel_size=2),
    case("t", "AvgPool1d", (2, 2, 6), kernel_size=3, stride=2, padding=1, ceil_mode=True),
    case("t", "AvgPool1d", (2, 2, 6), kernel_size=3, padding=1, ceil_mode=True, count_include_pad=False),
    case("tfe", "AvgPool2d", (1, 2, 5, 6), kernel_size=3, stride=2, padding=1),
    case("tf", "AvgPool2d", (1, 2, 5, 6), kernel_size=(3, 2), padding=(1, 0), count_include_pad=False),
    case("t", "AvgPool3d", (1, 2, 3, 4, 4), kernel_size=2, stride=(1, 2, 3), padding=1, ceil_mode=True),
    case("tfeh", "AvgPool3d", (2, 2, 2, 3, 4), kernel_size=2, stride=(1, 2, 1)),
    case("t", "AdaptiveAvgPool1d", (2, 2, 3, 7), output_size=3),
    case("te", "AdaptiveAvgPool1d", (2, 2, 6), output_size=3),
    case("t", "AdaptiveAvgPool2d", (1, 2, 7, 5), output_size=(3, None)),
    case("t", "AdaptiveAvgPool3d", (1, 2, 3, 4, 5), output_size=(2, 5, 3)),
    case("t", "AdaptiveMaxPool1d", (2, 2, 3, 7), tied=True, output_size=3),
    case("t", "AdaptiveMaxPool2d", (1, 2, 7, 5), tied=True, output_size=(3, None)),
    case("e", "AdaptiveMaxPool2d", (1, 2, 4, 6), output_size=(2, 3)),
    case("t", "AdaptiveMaxPool3d", (1, 2, 3, 4, 5), output_size=(2, 5, 3)),
    case("te", "GlobalAvgPool", (2, 3, 3, 4), num_spatial_dims=2),
    case("t", "GlobalMaxPool", (2, 2, 3, 4), tied=True, num_spatial_dims=2),
]
