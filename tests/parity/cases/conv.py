# SPDX-License-Identifier: Apache-2.0
"""Convolutions and transposed convolutions.

Options are Tether's; each library gets them in its own words, its kernel in its own layout. A case names the libraries
that have a word for all of its options.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from tests.parity.harness import Case, normal
from tether import nn

CONV = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSE = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}


def per_axis(options: dict[str, Any], name: str, axes: int, default: int = 1) -> tuple[int, ...]:
    value = options.get(name, default)
    return value if isinstance(value, tuple) else (value,) * axes


def padding(options: dict[str, Any], axes: int) -> Any:
    """Pairs, or a word."""
    value = options.get("padding", 0)
    if isinstance(value, str):
        return value
    return tuple(p if isinstance(p, tuple) else (p, p) for p in per_axis(options, "padding", axes, 0))


def axes_of(params: Any) -> int:
    return params["weight"].ndim - 2


def batched(x: Any, axes: int) -> Any:
    return x.reshape(-1, *x.shape[-axes - 1 :])


def conv_of_torch(options: Any, params: Any, states: Any, inputs: Any, training: bool) -> Any:
    import torch

    (x,), axes, weight = inputs, axes_of(params), params["weight"]
    given = {name: value for name, value in options.items() if name != "use_bias"}
    if isinstance(given.get("padding"), str):
        given["padding"] = given["padding"].lower()
    layer = getattr(torch.nn, f"Conv{axes}d")(
        x.shape[-axes - 1], weight.shape[0], bias="bias" in params, dtype=x.dtype, **given
    )
    y = torch.func.functional_call(layer, dict(params), (batched(x, axes),))
    return y.reshape(x.shape[: x.ndim - axes - 1] + y.shape[1:]), {}


def conv_of_flax(options: Any, params: Any, states: Any, inputs: Any, training: bool) -> Any:
    from flax import nnx

    (x,), axes, weight = inputs, axes_of(params), params["weight"]
    words = {"circular": "CIRCULAR", "reflect": "REFLECT"}
    layer = nnx.Conv(
        x.shape[-axes - 1],
        weight.shape[0],
        weight.shape[2:],
        per_axis(options, "stride", axes),
        padding=words.get(options.get("padding_mode"), padding(options, axes)),
        kernel_dilation=per_axis(options, "dilation", axes),
        feature_group_count=options.get("groups", 1),
        use_bias="bias" in params,
        param_dtype=jnp.float64,
        rngs=nnx.Rngs(0),
    )
    layer.kernel[...] = jnp.transpose(weight, (*range(2, axes + 2), 1, 0))
    if "bias" in params:
        layer.bias[...] = params["bias"]
    return jnp.moveaxis(layer(jnp.moveaxis(x, -axes - 1, -1)), -1, -axes - 1), {}


def with_values(layer: Any, weight: Any, params: Any, axes: int) -> Any:
    """An Equinox layer with other values, mapped over the leading axes of its input."""
    import equinox as eqx

    bias = None if "bias" not in params else params["bias"].reshape(-1, *[1] * axes)
    return eqx.tree_at(lambda c: (c.weight, c.bias), layer, (weight, bias), is_leaf=lambda leaf: leaf is None)


def mapped(layer: Any, x: Any, axes: int) -> Any:
    for _ in range(x.ndim - axes - 1):
        layer = jax.vmap(layer)
    return layer(x)


def conv_of_equinox(options: Any, params: Any, states: Any, inputs: Any, training: bool) -> Any:
    import equinox as eqx

    (x,), axes, weight = inputs, axes_of(params), params["weight"]
    options = {**options, "padding": padding(options, axes), "key": jax.random.key(0)}
    layer = getattr(eqx.nn, f"Conv{axes}d")(x.shape[-axes - 1], weight.shape[0], **options)
    return mapped(with_values(layer, weight, params, axes), x, axes), {}


def conv_of_haiku(options: Any, params: Any, states: Any, inputs: Any, training: bool) -> Any:
    import haiku as hk

    (x,), axes, weight = inputs, axes_of(params), params["weight"]
    pads = padding(options, axes)

    def forward(x: Any) -> Any:
        return hk.ConvND(
            axes,
            weight.shape[0],
            weight.shape[2:],
            per_axis(options, "stride", axes),
            per_axis(options, "dilation", axes),
            hk.pad.causal if pads == "CAUSAL" else pads,
            "bias" in params,
            data_format="NC...",
            feature_group_count=options.get("groups", 1),
        )(x)

    values = {"w": jnp.transpose(weight, (*range(2, axes + 2), 1, 0))}
    values |= {"b": params["bias"].reshape(-1, *[1] * axes)} if "bias" in params else {}
    y = hk.transform(forward).apply({"conv_nd": values}, None, batched(x, axes))
    return y.reshape(x.shape[: x.ndim - axes - 1] + y.shape[1:]), {}


def transpose_of_torch(options: Any, params: Any, states: Any, inputs: Any, training: bool) -> Any:
    import torch

    (x,), axes, weight = inputs, axes_of(params), params["weight"]
    given = {name: value for name, value in options.items() if name != "use_bias"}
    out = weight.shape[1] * options.get("groups", 1)
    layer = getattr(torch.nn, f"ConvTranspose{axes}d")(
        weight.shape[0], out, bias="bias" in params, dtype=x.dtype, **given
    )
    y = torch.func.functional_call(layer, dict(params), (batched(x, axes),))
    return y.reshape(x.shape[: x.ndim - axes - 1] + y.shape[1:]), {}


def zeros_around(options: Any, kernel: tuple[int, ...]) -> Any:
    """Padding as lax.conv_transpose counts it: zeros around x, and not what is taken off the output."""
    pads, axes = padding(options, len(kernel)), len(kernel)
    if isinstance(pads, str):
        return pads
    more = per_axis(options, "output_padding", axes, 0)
    last = [(k - 1) * d for k, d in zip(kernel, per_axis(options, "dilation", axes), strict=True)]
    return tuple((e - a, e - b + m) for e, (a, b), m in zip(last, pads, more, strict=True))


def transpose_of_flax(options: Any, params: Any, states: Any, inputs: Any, training: bool) -> Any:
    from flax import nnx

    (x,), axes, weight = inputs, axes_of(params), params["weight"]
    flipped = options.get("convention") != "correlation"
    layer = nnx.ConvTranspose(
        *weight.shape[:2],
        weight.shape[2:],
        per_axis(options, "stride", axes),
        padding=zeros_around(options, weight.shape[2:]),
        kernel_dilation=per_axis(options, "dilation", axes),
        use_bias="bias" in params,
        param_dtype=jnp.float64,
        transpose_kernel=flipped,
        rngs=nnx.Rngs(0),
    )
    layer.kernel[...] = jnp.transpose(weight, (*range(2, axes + 2), *((1, 0) if flipped else (0, 1))))
    if "bias" in params:
        layer.bias[...] = params["bias"]
    return jnp.moveaxis(layer(jnp.moveaxis(x, -axes - 1, -1)), -1, -axes - 1), {}


def transpose_of_equinox(options: Any, params: Any, states: Any, inputs: Any, training: bool) -> Any:
    import equinox as eqx

    (x,), axes, weight, groups = inputs, axes_of(params), params["weight"], options.get("groups", 1)
    out = weight.shape[1] * groups
    given = {**options, "padding": padding(options, axes), "key": jax.random.key(0)}
    del given["convention"]
    layer = getattr(eqx.nn, f"ConvTranspose{axes}d")(weight.shape[0], out, **given)
    parts = [part.swapaxes(0, 1) for part in jnp.split(weight, groups)]
    return mapped(with_values(layer, jnp.concatenate(parts), params, axes), x, axes), {}


def transpose_of_haiku(options: Any, params: Any, states: Any, inputs: Any, training: bool) -> Any:
    import haiku as hk

    (x,), axes, weight = inputs, axes_of(params), params["weight"]

    def forward(x: Any) -> Any:
        return hk.ConvNDTranspose(
            axes,
            weight.shape[1],
            weight.shape[2:],
            per_axis(options, "stride", axes),
            None,
            zeros_around(options, weight.shape[2:]),
            "bias" in params,
            data_format=("NCW", "NCHW", "NCDHW")[axes - 1],
        )(x)

    values = {"w": jnp.transpose(weight, (*range(2, axes + 2), 1, 0))}
    values |= {"b": params["bias"].reshape(-1, *[1] * axes)} if "bias" in params else {}
    y = hk.transform(forward).apply({"conv_nd_transpose": values}, None, batched(x, axes))
    return y.reshape(x.shape[: x.ndim - axes - 1] + y.shape[1:]), {}


LIBRARIES = {"t": "PyTorch", "f": "Flax NNX", "e": "Equinox", "h": "Haiku"}
OF_CONV = {"t": conv_of_torch, "f": conv_of_flax, "e": conv_of_equinox, "h": conv_of_haiku}
OF_TRANSPOSE = {"t": transpose_of_torch, "f": transpose_of_flax, "e": transpose_of_equinox, "h": transpose_of_haiku}


def case(classes: Any, peers: Any, letters: str, shape: tuple[int, ...], axes: int, out: int, **options: Any) -> Case:
    """One case; a letter stands for each library that has all of the options."""
    make = functools.partial(classes[axes], shape[-axes - 1], out, **options, key=jax.random.key(0))
    setting = ", ".join(f"{name}={value!r}" for name, value in options.items())
    asked = {LIBRARIES[letter]: functools.partial(peers[letter], options) for letter in letters}
    lead = f", {len(shape) - axes - 1} batch axes" if len(shape) != axes + 2 else ""
    return Case(classes[axes].__name__, setting + lead, make, normal(shape), asked, training=(True,))


conv = functools.partial(case, CONV, OF_CONV)
transpose = functools.partial(case, TRANSPOSE, OF_TRANSPOSE)

CASES = [
    conv("tfeh", (2, 2, 5), 1, 3, kernel_size=3),
    conv("tfeh", (2, 2, 8), 1, 2, kernel_size=3, stride=2, padding=1, dilation=2),
    conv("tfeh", (2, 2, 4, 5), 1, 4, kernel_size=2, groups=2, use_bias=False),
    conv("feh", (2, 2, 5), 1, 2, kernel_size=3, padding=((2, 0),)),
    conv("feh", (2, 2, 6), 1, 2, kernel_size=3, padding="SAME", stride=2),
    conv("tfeh", (1, 2, 7), 1, 2, kernel_size=4, padding="SAME", dilation=2),
    conv("feh", (1, 2, 5), 1, 2, kernel_size=2, padding="SAME_LOWER"),
    conv("fh", (1, 2, 6), 1, 2, kernel_size=3, padding="CAUSAL", dilation=2),
    conv("fh", (1, 2, 7), 1, 2, kernel_size=2, padding="CAUSAL", stride=3),
    conv("tfe", (1, 2, 5), 1, 2, kernel_size=4, padding="SAME", padding_mode="circular"),
    conv("tfe", (1, 2, 5), 1, 2, kernel_size=3, padding="SAME", padding_mode="reflect", dilation=2),
    conv("e", (1, 2, 3), 1, 2, kernel_size=3, padding=((5, 1),), padding_mode="replicate"),
    conv("tfeh", (2, 2, 3, 4), 2, 2, kernel_size=2),
    conv("tfeh", (2, 5, 5), 2, 3, kernel_size=3, stride=2, padding=1),
    conv("tfeh", (1, 4, 4, 5), 2, 4, kernel_size=(3, 2), stride=(2, 1), padding=(1, 2), dilation=(1, 2), groups=2),
    conv("feh", (1, 2, 4, 5), 2, 2, kernel_size=3, padding="SAME", stride=2),
    conv("tfeh", (2, 2, 2, 4, 3), 2, 2, kernel_size=2, padding="VALID", use_bias=False),
    conv("tfeh", (1, 3, 4, 4), 2, 6, kernel_size=2, groups=3),
    conv("te", (1, 2, 4, 4), 2, 2, kernel_size=3, padding=1, padding_mode="circular", stride=2),
    conv("tfe", (1, 2, 4, 4), 2, 2, kernel_size=3, padding="SAME", padding_mode="reflect"),
    conv("te", (1, 2, 4, 4), 2, 2, kernel_size=2, padding=(0, 3), padding_mode="replicate"),
    conv("h", (1, 2, 4, 4), 2, 2, kernel_size=2, padding="CAUSAL", dilation=(1, 2)),
    conv("tfeh", (1, 2, 2, 3, 4), 3, 2, kernel_size=2),
    conv(
        "tfeh",
        (1, 2, 3, 3, 4),
        3,
        2,
        kernel_size=(1, 2, 3),
        stride=(1, 2, 1),
        padding=(0, 1, 1),
        dilation=(1, 2, 1),
        groups=2,
    ),
    conv("tfeh", (1, 2, 2, 3, 3), 3, 2, kernel_size=2, padding="SAME"),
    conv("te", (1, 2, 2, 3, 2), 3, 2, kernel_size=2, padding=1, padding_mode="circular"),
    transpose("tf", (2, 2, 4), 1, 3, kernel_size=3, stride=2),
    transpose("t", (1, 4, 4), 1, 2, kernel_size=3, stride=3, padding=2, dilation=2, groups=2, output_padding=2),
    transpose("f", (1, 2, 4), 1, 3, kernel_size=4, stride=2, padding="SAME"),
    transpose("feh", (1, 2, 4), 1, 3, kernel_size=3, stride=2, padding="SAME", convention="correlation"),
    transpose("feh", (1, 2, 4), 1, 3, kernel_size=3, stride=2, padding="VALID", convention="correlation"),
    transpose("fh", (1, 2, 3), 1, 3, kernel_size=2, stride=3, padding="VALID", convention="correlation"),
    transpose(
        "feh", (1, 2, 4), 1, 3, kernel_size=3, stride=2, padding=((0, 1),), output_padding=1, convention="correlation"
    ),
    transpose("tf", (2, 2, 2, 3, 2), 2, 2, kernel_size=2, padding=1, use_bias=False),
    transpose(
        "t", (1, 2, 3, 3), 2, 4, kernel_size=(3, 2), stride=(2, 1), padding=(1, 0), output_padding=(1, 0), groups=2
    ),
    transpose("feh", (1, 2, 3, 2), 2, 2, kernel_size=3, stride=(1, 2), padding="SAME", convention="correlation"),
    transpose("e", (1, 4, 3, 3), 2, 2, kernel_size=2, stride=2, dilation=2, groups=2, convention="correlation"),
    transpose("e", (1, 2, 3, 2), 2, 2, kernel_size=4, padding="SAME_LOWER", convention="correlation"),
    transpose("t", (1, 2, 2, 1, 2), 3, 2, kernel_size=2, stride=(1, 2, 2), padding=(1, 0, 0)),
    transpose("feh", (1, 2, 1, 2, 2), 3, 2, kernel_size=2, stride=2, padding="SAME", convention="correlation"),
]
