# SPDX-License-Identifier: Apache-2.0
"""Layers that normalize, inputs or weights, and dropout where nothing is left to chance."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tests.parity.harness import Case, Peer, normal
from tether import nn
from tether.nn._dropout import AlphaDropout
from tether.nn._group_norm import GroupNorm, InstanceNorm
from tether.nn._norm import RMSNorm
from tether.nn._spectral_norm import SpectralNorm
from tether.nn._weight_norm import WeightNorm

STEPS = (True, True, True, False)


def key() -> jax.Array:
    return jax.random.key(0)


def without_state(layer: Callable[..., Any]) -> Peer:
    """A layer of parameters and one input, as the harness calls it."""
    return lambda params, states, inputs, training: (layer(params, inputs[0]), {})


def haiku_values(params: Any) -> dict[str, Any]:
    return {there: params[here] for here, there in (("weight", "scale"), ("bias", "offset")) if here in params}


def with_params(layer: Any, params: Any) -> Any:
    """An Equinox layer with weight and bias."""
    import equinox as eqx

    values = (params.get("weight"), params.get("bias"))
    return eqx.tree_at(lambda layer: (layer.weight, layer.bias), layer, values, is_leaf=lambda x: x is None)


def set_flax(layer: Any, params: Any) -> Any:
    if "weight" in params:
        layer.scale[...] = params["weight"]
    if "bias" in params:
        layer.bias[...] = params["bias"]
    return layer


def vectorized(layer: Any, x: Any, rank: int) -> Any:
    for _ in range(x.ndim - rank):
        layer = jax.vmap(layer)
    return layer(x)


def trailing(kind: str, shape: tuple[int, ...], eps: float, libraries: str) -> dict[str, Peer]:
    """LayerNorm or RMSNorm over the trailing axes."""

    def torch_layer(params: Any, x: Any) -> Any:
        from torch.nn import functional as F

        if kind == "LayerNorm":
            return F.layer_norm(x, shape, params.get("weight"), params.get("bias"), eps)
        return F.rms_norm(x, shape, params.get("weight"), eps)

    def flax_layer(params: Any, x: Any) -> Any:
        from flax import nnx

        options = {"use_bias": "bias" in params, "use_fast_variance": False} if kind == "LayerNorm" else {}
        options |= {"use_scale": "weight" in params, "param_dtype": jnp.float64, "epsilon": eps, "rngs": nnx.Rngs(0)}
        return set_flax(getattr(nnx, kind)(*shape, **options), params)(x)

    def equinox_layer(params: Any, x: Any) -> Any:
        import equinox as eqx

        layer = getattr(eqx.nn, kind)(shape, eps, use_weight="weight" in params, use_bias="bias" in params)
        return vectorized(with_params(layer, params), x, len(shape))

    def haiku_layer(params: Any, x: Any) -> Any:
        import haiku as hk

        axes = tuple(range(-len(shape), 0))
        options = {"create_scale": "weight" in params, "eps": eps, "param_axis": axes}
        if kind == "LayerNorm":
            options["create_offset"] = "bias" in params
        forward = hk.transform(lambda x: getattr(hk, kind)(axes, name="norm", **options)(x))
        full = shape if len(shape) == 1 else (1,) * (x.ndim - len(shape)) + shape
        values = {name: value.reshape(full) for name, value in haiku_values(params).items()}
        return forward.apply({"norm": values}, None, x)

    layers = {"PyTorch": torch_layer, "Flax NNX": flax_layer, "Equinox": equinox_layer, "Haiku": haiku_layer}
    return {name: without_state(layer) for name, layer in layers.items() if name[0] in libraries}


def channels(groups: int | None, size: int, eps: float, libraries: str, last: bool = False) -> dict[str, Peer]:
    """GroupNorm, or for groups=None InstanceNorm without running statistics; ``last``: x is channels last."""

    def torch_layer(params: Any, x: Any) -> Any:
        from torch.nn import functional as F

        x, values = x.movedim(-1, 1) if last else x, (params.get("weight"), params.get("bias"))
        if groups is None:
            y = F.instance_norm(x, None, None, *values, True, 0.1, eps)
        else:
            y = F.group_norm(x, groups, *values, eps)
        return y.movedim(1, -1) if last else y

    def flax_layer(params: Any, x: Any) -> Any:
        from flax import nnx

        options = {"use_bias": "bias" in params, "use_scale": "weight" in params, "use_fast_variance": False}
        options |= {"param_dtype": jnp.float64, "epsilon": eps, "rngs": nnx.Rngs(0)}
        cls = nnx.InstanceNorm if groups is None else functools.partial(nnx.GroupNorm, num_groups=groups)
        y = set_flax(cls(size, **options), params)(x if last else jnp.moveaxis(x, 1, -1))
        return y if last else jnp.moveaxis(y, -1, 1)

    def equinox_layer(params: Any, x: Any) -> Any:
        import equinox as eqx

        layer = eqx.nn.GroupNorm(groups or size, size, eps, channelwise_affine="weight" in params)
        return jax.vmap(with_params(layer, params))(x)

    def haiku_layer(params: Any, x: Any) -> Any:
        import haiku as hk

        options = {"create_scale": "weight" in params, "create_offset": "bias" in params, "eps": eps, "name": "norm"}
        options["data_format"] = "channels_last" if last else "channels_first"
        make = hk.InstanceNorm if groups is None else functools.partial(hk.GroupNorm, groups)
        forward = hk.transform(lambda x: make(**options)(x))
        shape = (size,) if last else (*[1] * (groups is None), size, *[1] * (x.ndim - 2))
        values = {name: value.reshape(shape) for name, value in haiku_values(params).items()}
        return forward.apply({"norm": values}, None, x)

    layers = {"PyTorch": torch_layer, "Flax NNX": flax_layer, "Equinox": equinox_layer, "Haiku": haiku_layer}
    return {name: without_state(layer) for name, layer in layers.items() if name[0] in libraries}


def tracked(momentum: float) -> Peer:
    def peer(params: Any, states: Any, inputs: Any, training: bool) -> Any:
        from torch.nn import functional as F

        mean, var = states["mean"].clone(), states["var"].clone()
        values = (params.get("weight"), params.get("bias"))
        y = F.instance_norm(inputs[0], mean, var, *values, training, momentum, 1e-5)
        return y, {"mean": mean, "var": var}

    return peer


def torch_wrapped(wrap: Callable[[Any], Any], stored: dict[str, str], make: Callable[[], Any]) -> Peer:
    """A PyTorch layer with a parametrized weight; ``stored``: a path there -> the path here."""

    def peer(params: Any, states: Any, inputs: Any, training: bool) -> Any:
        import torch

        layer = wrap(make()).double().train(training)
        after = {path: value.clone() for path, value in states.items()}
        values = {there: {**params, **after}[here] for there, here in stored.items()}
        if "layer.bias" in params:
            values["bias"] = params["layer.bias"]
        return torch.func.functional_call(layer, values, inputs), after

    return peer


def torch_linear() -> Any:
    import torch

    return torch.nn.Linear(4, 3)


def torch_conv() -> Any:
    import torch

    return torch.nn.Conv1d(2, 3, 2)


def spectral_of_torch(make: Callable[[], Any], **options: Any) -> Peer:
    def wrap(layer: Any) -> Any:
        from torch.nn.utils import parametrizations

        return parametrizations.spectral_norm(layer, **options)

    place = "parametrizations.weight."
    return torch_wrapped(wrap, {place + "original": "layer.weight", place + "0._u": "u", place + "0._v": "v"}, make)


def weight_of_torch(make: Callable[[], Any], dim: int | None) -> Peer:
    def wrap(layer: Any) -> Any:
        from torch.nn.utils import parametrizations

        return parametrizations.weight_norm(layer, dim=dim)  # pyright: ignore[reportArgumentType]

    place, scale = "parametrizations.weight.", "scale"
    peer = torch_wrapped(wrap, {place + "original0": scale, place + "original1": "layer.weight"}, make)
    if dim is not None:
        return peer
    return lambda params, *rest: peer({**params, scale: params[scale].reshape(())}, *rest)


def equinox_inner(params: Any) -> Any:
    import equinox as eqx

    weight, bias = params["layer.weight"], params["layer.bias"]
    if weight.ndim == 2:
        layer = eqx.nn.Linear(weight.shape[1], weight.shape[0], key=key())
    else:
        layer, bias = eqx.nn.Conv1d(weight.shape[1], weight.shape[0], weight.shape[2], key=key()), bias[:, None]
    return eqx.tree_at(lambda layer: (layer.weight, layer.bias), layer, (weight, bias))


def spectral_of_equinox(steps: int) -> Peer:
    def peer(params: Any, states: Any, inputs: Any, training: bool) -> Any:
        import equinox as eqx

        inner = equinox_inner(params)
        layer, state = eqx.nn.make_with_state(eqx.nn.SpectralNorm)(inner, "weight", steps, key=key())
        state = state.set(layer.uv_index, (states["u"], states["v"]))
        call = functools.partial(layer, inference=not training)
        y, state = jax.vmap(call, in_axes=(0, None), out_axes=(0, None))(inputs[0], state)
        u, v = state.get(layer.uv_index)
        return y, {"u": u, "v": v}

    return peer


def weight_of_equinox(axis: int | None) -> Peer:
    def layer(params: Any, x: Any) -> Any:
        import equinox as eqx

        layer = eqx.nn.WeightNorm(equinox_inner(params), axis=axis)
        layer = eqx.tree_at(lambda layer: layer.g, layer, params["scale"].reshape(layer.g.shape))
        return jax.vmap(layer)(x)

    return without_state(layer)


def flax_inner(params: Any) -> Any:
    from flax import nnx

    weight, bias = params["layer.weight"], params["layer.bias"]
    layer = nnx.Linear(weight.shape[1], weight.shape[0], param_dtype=jnp.float64, rngs=nnx.Rngs(0))
    layer.kernel[...], layer.bias[...] = weight.T, bias
    return layer


def spectral_of_flax(steps: int) -> Peer:
    def peer(params: Any, states: Any, inputs: Any, training: bool) -> Any:
        from flax import nnx

        layer = nnx.SpectralNorm(flax_inner(params), n_steps=steps, param_dtype=jnp.float64, rngs=nnx.Rngs(0))
        u = layer.batch_stats["kernel", "u"]
        u[...] = states["u"][None]
        y = layer(inputs[0], update_stats=training)
        return y, {"u": u[...][0], "v": states["v"]}

    return peer


def weight_of_flax() -> Peer:
    def layer(params: Any, x: Any) -> Any:
        from flax import nnx

        layer = nnx.WeightNorm(flax_inner(params), feature_axes=-1, epsilon=1e-30, rngs=nnx.Rngs(0))
        layer.scales[("kernel",)] = params["scale"].reshape(-1)
        return layer(x)

    return without_state(layer)


def spectral_of_haiku(steps: int) -> Peer:
    def peer(params: Any, states: Any, inputs: Any, training: bool) -> Any:
        import haiku as hk

        def forward(kernel: Any) -> Any:
            return hk.SpectralNorm(eps=1e-12, n_steps=steps, name="norm")(kernel, update_stats=training)

        held = {"norm": {"u0": states["u"][None], "sigma": jnp.ones(())}}
        kernel, held = hk.transform_with_state(forward).apply({}, held, None, params["layer.weight"].T)
        y = inputs[0] @ kernel + params["layer.bias"]
        return y, {"u": held["norm"]["u0"][0], "v": states["v"]}

    return peer


def linear() -> nn.Linear:
    return nn.Linear(4, 3, key=key())


def conv() -> nn.Conv1d:
    return nn.Conv1d(2, 3, 2, key=key())


def dropout(name: str, p: float) -> dict[str, Peer]:
    def torch_layer(params: Any, states: Any, inputs: Any, training: bool) -> Any:
        from torch.nn import functional as F

        return getattr(F, name)(inputs[0], p, training), {}

    def flax_layer(params: Any, states: Any, inputs: Any, training: bool) -> Any:
        from flax import nnx

        return nnx.Dropout(p, deterministic=not training, rngs=nnx.Rngs(0))(inputs[0]), {}

    def equinox_layer(params: Any, states: Any, inputs: Any, training: bool) -> Any:
        import equinox as eqx

        return eqx.nn.Dropout(p, inference=not training)(inputs[0], key=key()), {}

    found: dict[str, Peer] = {"PyTorch": torch_layer}
    if name == "dropout":
        found["Flax NNX"] = flax_layer
        if p < 1:  # Equinox divides by 1 - p
            found["Equinox"] = equinox_layer
    return found


vectors, images = normal((3, 4)), normal((2, 4, 3, 2))
converged = functools.partial(SpectralNorm, n_power_iterations=60, key=key())
no_v = {"Flax NNX": ("state v",), "Haiku": ("state v",)}  # which keep u alone

CASES = [
    Case("LayerNorm", "", lambda: nn.LayerNorm(4), vectors, trailing("LayerNorm", (4,), 1e-5, "PFEH")),
    Case(
        "LayerNorm",
        "eps=0.1, use_bias=False",
        lambda: nn.LayerNorm(4, eps=0.1, use_bias=False),
        normal((2, 3, 4)),
        trailing("LayerNorm", (4,), 0.1, "PFEH"),
    ),
    Case(
        "LayerNorm",
        "two axes",
        lambda: nn.LayerNorm((3, 4)),
        normal((2, 3, 4)),
        trailing("LayerNorm", (3, 4), 1e-5, "PEH"),
    ),
    Case(
        "LayerNorm",
        "use_weight=False, use_bias=False",
        lambda: nn.LayerNorm(4, use_weight=False, use_bias=False),
        vectors,
        trailing("LayerNorm", (4,), 1e-5, "PFEH"),
    ),
    Case("RMSNorm", "", lambda: RMSNorm(4), vectors, trailing("RMSNorm", (4,), 1e-6, "PFEH")),
    Case(
        "RMSNorm",
        "eps=0.1, use_weight=False",
        lambda: RMSNorm(4, eps=0.1, use_weight=False),
        normal((2, 3, 4)),
        trailing("RMSNorm", (4,), 0.1, "PFEH"),
    ),
    Case("RMSNorm", "two axes", lambda: RMSNorm((3, 4)), normal((2, 3, 4)), trailing("RMSNorm", (3, 4), 1e-6, "PEH")),
    Case("RMSNorm", "use_bias=True", lambda: RMSNorm(4, use_bias=True), vectors, trailing("RMSNorm", (4,), 1e-6, "E")),
    Case("GroupNorm", "2, 4", lambda: GroupNorm(2, 4), images, channels(2, 4, 1e-5, "PFEH")),
    Case(
        "GroupNorm",
        "1 group, eps=0.1",
        lambda: GroupNorm(1, 4, eps=0.1),
        normal((2, 4, 3)),
        channels(1, 4, 0.1, "PFEH"),
    ),
    Case(
        "GroupNorm",
        "no space axis, affine=False",
        lambda: GroupNorm(2, 6, affine=False),
        normal((3, 6)),
        channels(2, 6, 1e-5, "PEH"),
    ),
    Case(
        "GroupNorm",
        "channel_axis=-1, space_axes=(1, 2)",
        lambda: GroupNorm(2, 4, channel_axis=-1, space_axes=(1, 2)),
        normal((2, 3, 2, 4)),
        channels(2, 4, 1e-5, "PFH", last=True),
    ),
    Case("InstanceNorm", "", lambda: InstanceNorm(4), images, channels(None, 4, 1e-5, "PFEH")),
    Case(
        "InstanceNorm",
        "affine=True, eps=0.1",
        lambda: InstanceNorm(4, affine=True, eps=0.1),
        normal((2, 4, 3)),
        channels(None, 4, 0.1, "PFEH"),
    ),
    Case(
        "InstanceNorm",
        "affine=True, channel_axis=-1, space_axes=(1, 2)",
        lambda: InstanceNorm(4, affine=True, channel_axis=-1, space_axes=(1, 2)),
        normal((2, 3, 2, 4)),
        channels(None, 4, 1e-5, "PFH", last=True),
    ),
    Case(
        "InstanceNorm",
        "track_running_stats=True",
        lambda: InstanceNorm(4, track_running_stats=True),
        images,
        {"PyTorch": tracked(0.1)},
        training=STEPS,
    ),
    Case(
        "InstanceNorm",
        "affine=True, track_running_stats=True, decay=0.7",
        lambda: InstanceNorm(4, affine=True, track_running_stats=True, decay=0.7),
        normal((3, 4, 5)),
        {"PyTorch": tracked(0.3)},
        training=STEPS,
    ),
    Case(
        "SpectralNorm",
        "",
        lambda: SpectralNorm(linear(), key=key()),
        vectors,
        {"PyTorch": spectral_of_torch(torch_linear), "Equinox": spectral_of_equinox(1)},
        training=STEPS,
    ),
    Case(
        "SpectralNorm",
        "n_power_iterations=3, axis=1",
        lambda: SpectralNorm(linear(), n_power_iterations=3, axis=1, key=key()),
        vectors,
        {"PyTorch": spectral_of_torch(torch_linear, n_power_iterations=3, dim=1)},
        training=STEPS,
    ),
    Case(
        "SpectralNorm",
        "Conv1d",
        lambda: SpectralNorm(conv(), key=key()),
        normal((2, 2, 4)),
        {"PyTorch": spectral_of_torch(torch_conv), "Equinox": spectral_of_equinox(1)},
        training=STEPS,
    ),
    Case(
        "SpectralNorm",
        "Conv1d, axis=-1, eps=0.1",
        lambda: SpectralNorm(conv(), axis=-1, eps=0.1, key=key()),
        normal((2, 2, 4)),
        {"PyTorch": spectral_of_torch(torch_conv, dim=2, eps=0.1)},
        training=STEPS,
    ),
    Case(
        "SpectralNorm",
        "n_power_iterations=60",  # where the order of u and v within a step no longer matters
        lambda: converged(linear()),
        vectors,
        {"PyTorch": spectral_of_torch(torch_linear, n_power_iterations=60)}
        | {"Equinox": spectral_of_equinox(60), "Flax NNX": spectral_of_flax(60), "Haiku": spectral_of_haiku(60)},
        training=STEPS,
        without=no_v,
    ),
    Case(
        "WeightNorm",
        "",
        lambda: WeightNorm(linear()),
        vectors,
        {"PyTorch": weight_of_torch(torch_linear, 0), "Equinox": weight_of_equinox(0), "Flax NNX": weight_of_flax()},
    ),
    Case(
        "WeightNorm",
        "axis=1",
        lambda: WeightNorm(linear(), axis=1),
        vectors,
        {"PyTorch": weight_of_torch(torch_linear, 1), "Equinox": weight_of_equinox(1)},
    ),
    Case(
        "WeightNorm",
        "axis=None",
        lambda: WeightNorm(linear(), axis=None),
        vectors,
        {"PyTorch": weight_of_torch(torch_linear, None), "Equinox": weight_of_equinox(None)},
    ),
    Case(
        "WeightNorm",
        "Conv1d",
        lambda: WeightNorm(conv()),
        normal((2, 2, 4)),
        {"PyTorch": weight_of_torch(torch_conv, 0), "Equinox": weight_of_equinox(0)},
    ),
    Case("Dropout", "0.5, evaluation", lambda: nn.Dropout(0.5), vectors, dropout("dropout", 0.5), training=(False,)),
    Case("Dropout", "0", lambda: nn.Dropout(0.0), vectors, dropout("dropout", 0.0)),
    Case("Dropout", "1", lambda: nn.Dropout(1.0), vectors, dropout("dropout", 1.0)),
    Case("AlphaDropout", "1", lambda: AlphaDropout(1.0), vectors, dropout("alpha_dropout", 1.0)),
]
