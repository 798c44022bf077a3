# SPDX-License-Identifier: Apache-2.0
"""BatchNorm: each preset beside the library it is named after, state for state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import tether
from tests.parity.harness import Case, normal
from tether import nn


def of_torch(params: Any, states: Any, inputs: Any, training: bool, decay: float = 0.9, eps: float = 1e-5) -> Any:
    import torch

    after = {name: states[name].clone() for name in ("mean", "var")}
    affine = params.get("weight"), params.get("bias")
    y = torch.nn.functional.batch_norm(inputs[0], *after.values(), *affine, training, 1 - decay, eps)
    return y, after


def of_torch_channels_last(params: Any, states: Any, inputs: Any, training: bool) -> Any:
    y, after = of_torch(params, states, (inputs[0].movedim(-1, 1),), training, decay=0.7, eps=1e-3)
    return y.movedim(1, -1), after


def of_flax(params: Any, states: Any, inputs: Any, training: bool) -> Any:
    from flax import nnx

    x, mask = inputs if len(inputs) == 2 else (inputs[0], None)
    options = {"use_bias": bool(params), "use_scale": bool(params), "use_running_average": not training}
    layer = nnx.BatchNorm(x.shape[-1], **options, param_dtype=jnp.float64, rngs=nnx.Rngs(0))
    for cell, path in ((layer.scale, "weight"), (layer.bias, "bias")):
        if params:
            cell[...] = params[path]
    # Written to, they would stay float32.
    layer.mean, layer.var = nnx.BatchStat(states["mean"]), nnx.BatchStat(states["var"])
    y = layer(x, mask=mask)
    return y, {"mean": layer.mean[...], "var": layer.var[...]}


def seen(states: Any) -> int:
    """How many batches; a number of Python in the trace as well."""
    return int(np.asarray(states["count"])[0])


def of_haiku(params: Any, states: Any, inputs: Any, training: bool) -> Any:
    import haiku as hk

    x, decay = inputs[0], 0.99
    wide = lambda s: jnp.reshape(s, (1, -1, *[1] * (x.ndim - 2)))
    forward = lambda x: hk.BatchNorm(bool(params), bool(params), decay, data_format="NC...")(x, is_training=training)
    values = {name: wide(params[path]) for name, path in (("scale", "weight"), ("offset", "bias")) if params}
    count = seen(states)
    averages = {
        f"batch_norm/~/{name}_ema": {
            "counter": jnp.int32(count),
            "average": wide(states[name]),
            "hidden": wide(states[name] * (1 - decay**count)),
        }
        for name in ("mean", "var")
    }
    run = hk.without_apply_rng(hk.transform_with_state(forward))
    y, new = run.apply({"batch_norm": values} if params else {}, averages, x)
    after = {name: new[f"batch_norm/~/{name}_ema"]["average"].ravel() for name in ("mean", "var")}
    counter = new["batch_norm/~/mean_ema"]["counter"]
    return y, after | {"count": jnp.full_like(states["count"], counter)}


def of_equinox(params: Any, states: Any, inputs: Any, training: bool, mode: str) -> Any:
    import equinox as eqx

    make = eqx.nn.make_with_state(eqx.nn.BatchNorm)
    size, count = states["mean"].shape[0], seen(states)
    layer, state = make(size, "batch", mode=mode, channelwise_affine=bool(params), dtype=jnp.float64)
    if params:
        layer = eqx.tree_at(lambda norm: (norm.weight, norm.bias), layer, (params["weight"], params["bias"]))
    # In mode "batch" it keeps the averages before the division, and var's begins at 1.
    scale = lambda count: 1 - layer.momentum**count if mode == "batch" and count > 0 else 1
    held = layer.batch_state_index if mode == "batch" else layer.ema_state_index
    state = state.set(held, (states["mean"] * scale(count), states["var"] * scale(count)))
    if mode == "batch":
        state = state.set(layer.batch_counter, state.get(layer.batch_counter) + count)
    else:
        state = state.set(layer.ema_first_time_index, jnp.asarray(count == 0))
    call = lambda x: layer(x, state, inference=not training)
    y, new = jax.vmap(call, axis_name="batch", out_axes=(0, None))(inputs[0])
    mean, var = (average / scale(count + training) for average in new.get(held))
    return y, {"mean": mean, "var": var, "count": states["count"] + training}


def of_equinox_ema(params: Any, states: Any, inputs: Any, training: bool) -> Any:
    return of_equinox(params, states, inputs, training, "ema")


def of_equinox_batch(params: Any, states: Any, inputs: Any, training: bool) -> Any:
    return of_equinox(params, states, inputs, training, "batch")


PEERS = {
    "torch": ("PyTorch", of_torch),
    "flax": ("Flax NNX", of_flax),
    "haiku": ("Haiku", of_haiku),
    "equinox-ema": ("Equinox", of_equinox_ema),
    "equinox-batch": ("Equinox", of_equinox_batch),
}


def masked(rng: np.random.Generator) -> Sequence[np.ndarray]:
    return rng.normal(size=(6, 4, 3)), rng.random((6, 4, 1)) < 0.6


def lanes(norm: nn.BatchNorm, x: Any) -> Any:
    return tether.vmap(norm, axis_name="batch")(x) if norm.training else tether.vmap(norm)(x)


def case(
    preset: str, setting: str, inputs: Any, peer: Callable | None = None, call: Any = None, **options: Any
) -> Case:
    """Three steps of training, and an evaluation."""
    library, usual = PEERS[preset]
    words = ", ".join([f"preset={preset!r}", *[f"{name}={value!r}" for name, value in options.items()], setting])
    return Case(
        "BatchNorm",
        words.removesuffix(", "),
        lambda: nn.BatchNorm.preset(preset, 3, **options),
        normal(inputs) if isinstance(inputs, tuple) else inputs,
        {library: peer or usual},
        training=(True, True, True, False),
        **({} if call is None else {"call": call}),
    )


CASES = [
    case("torch", "", (6, 3)),
    case("torch", "one space axis", (4, 3, 5)),
    case("torch", "two space axes", (4, 3, 5, 2), affine=False),
    case("torch", "", (4, 5, 3), of_torch_channels_last, channel_axis=-1, decay=0.7, eps=1e-3),
    case("flax", "", (6, 3)),
    case("flax", "two space axes", (4, 5, 2, 3), channel_axis=-1),
    case("flax", "one space axis", (4, 5, 3), channel_axis=-1, affine=False),
    case("flax", "mask", masked, call=lambda norm, x, mask: norm(x, mask=mask), channel_axis=-1),
    case("haiku", "", (6, 3)),
    case("haiku", "two space axes", (4, 3, 5, 2), affine=False),
    case("equinox-ema", "", (6, 3)),
    case("equinox-ema", "two space axes", (4, 3, 5, 2), affine=False),
    case("equinox-ema", "one space axis", (6, 3, 5), call=lanes, axis_name="batch"),
    case("equinox-batch", "", (6, 3)),
    case("equinox-batch", "two space axes", (4, 3, 5, 2)),
]
