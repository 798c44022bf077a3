# SPDX-License-Identifier: Apache-2.0
"""MultiHeadAttention and RotaryEmbedding."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.parity.harness import Case, normal
from tether import nn
from tether.nn._attention import MultiHeadAttention
from tether.nn._rotary import RotaryEmbedding

HEADS = 4


def key() -> jax.Array:
    return jax.random.key(0)


def sides(inputs: Any) -> tuple[Any, Any, Any, Any]:
    """Targets, keys, values and mask, of whichever are there."""
    mask = inputs[-1] if str(inputs[-1].dtype).endswith("bool") else None
    arrays = inputs if mask is None else inputs[:-1]
    return arrays[0], arrays[min(1, len(arrays) - 1)], arrays[-1], mask


def called(layer: Any, *inputs: Any) -> jax.Array:
    *arrays, last = inputs
    return layer(*arrays, mask=last) if last.dtype == jnp.bool_ else layer(*inputs)


def of_torch(causal: bool = False) -> Any:
    def run(params: Any, states: Any, inputs: Any, training: bool) -> Any:
        import torch

        x, keys, values, mask = sides(inputs)
        size = x.shape[-1]
        layer = torch.nn.MultiheadAttention(
            size, HEADS, 0.0, True, kdim=keys.shape[-1], vdim=values.shape[-1], batch_first=True, dtype=torch.float64
        )
        weights = [params[f"{name}_proj.weight"] for name in ("query", "key", "value")]
        biases = [params[f"{name}_proj.bias"] for name in ("query", "key", "value", "out")]
        named = {
            "in_proj_bias": torch.cat(biases[:3]),
            "out_proj.bias": biases[3],
            "out_proj.weight": params["out_proj.weight"],
        }
        if layer.in_proj_weight is None:
            named |= dict(zip(("q_proj_weight", "k_proj_weight", "v_proj_weight"), weights, strict=True))
        else:
            named["in_proj_weight"] = torch.cat(weights)
        hidden = torch.ones(x.shape[-2], x.shape[-2]).triu(1).bool() if causal else None
        options = {"need_weights": False, "attn_mask": hidden if mask is None else ~mask}
        return torch.func.functional_call(layer, named, (x, keys, values), options)[0], {}

    return run


def of_torch_function(causal: bool = False) -> Any:
    """F.scaled_dot_product_attention between linear maps."""

    def run(params: Any, states: Any, inputs: Any, training: bool) -> Any:
        from torch.nn import functional as F

        x, keys, values, mask = sides(inputs)
        size = params["query_proj.weight"].shape[0] // HEADS

        def heads(name: str, h: Any) -> Any:
            y = F.linear(h, params[f"{name}_proj.weight"], params.get(f"{name}_proj.bias"))
            return y.unflatten(-1, (-1, size)).transpose(-2, -3)

        q, k, v = heads("query", x), heads("key", keys), heads("value", values)
        mask = None if mask is None else mask.unsqueeze(-3) if mask.ndim == x.ndim else mask
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, enable_gqa=True)
        y = y.transpose(-2, -3).flatten(-2)
        return F.linear(y, params["out_proj.weight"], params.get("out_proj.bias")), {}

    return run


def of_flax(causal: bool = False, steps: bool = False) -> Any:
    def run(params: Any, states: Any, inputs: Any, training: bool) -> Any:
        from flax import nnx

        x, keys, values, mask = sides(inputs)
        width = params["query_proj.weight"].shape[0]
        size, biased = width // HEADS, "query_proj.bias" in params
        groups = params["key_proj.weight"].shape[0] // size
        layer = nnx.MultiHeadAttention(
            HEADS,
            x.shape[-1],
            width,
            in_kv_features=keys.shape[-1],
            num_kv_heads=groups,
            use_bias=biased,
            param_dtype=jnp.float64,
            dtype=jnp.float64,
            decode=steps,
            normalize_qk="query_norm.weight" in params,
            rngs=nnx.Rngs(0),
        )
        for name in ("query", "key", "value", "out"):
            linear, weight = getattr(layer, name), params[f"{name}_proj.weight"]
            linear.kernel[...] = weight.T.reshape(linear.kernel.shape)
            if biased:
                linear.bias[...] = params[f"{name}_proj.bias"].reshape(linear.bias.shape)
        for name in ("query", "key") if "query_norm.weight" in params else ():
            getattr(layer, f"{name}_ln").scale[...] = params[f"{name}_norm.weight"]
        # Without sow_weights it calls JAX's function, which computes the softmax in float32.
        if steps:
            layer.init_cache(x.shape, dtype=jnp.float64)
            return jnp.concatenate([layer(x[:, i : i + 1], sow_weights=True) for i in range(x.shape[1])], 1), {}
        seen = nnx.make_causal_mask(x[..., 0]) if causal else None
        if mask is not None:
            seen = mask[:, None] if mask.ndim == x.ndim else mask
        return layer(x, keys, values, mask=seen, decode=False, sow_weights=True), {}

    return run


def of_equinox(causal: bool = False, rotary: bool = False) -> Any:
    def run(params: Any, states: Any, inputs: Any, training: bool) -> Any:
        import equinox as eqx

        x, keys, values, mask = sides(inputs)
        width, size = params["query_proj.weight"].shape
        layer = eqx.nn.MultiheadAttention(
            HEADS,
            size,
            keys.shape[-1],
            values.shape[-1],
            qk_size=width // HEADS,
            vo_size=width // HEADS,
            **{
                f"use_{name}_bias": f"{name[:6].removesuffix('put')}_proj.bias" in params
                for name in ("query", "key", "value", "output")
            },
            key=key(),
        )
        for name in ("query", "key", "value", "output"):
            own = "out" if name == "output" else name
            where = lambda layer, name=name: (
                getattr(layer, f"{name}_proj").weight,
                getattr(layer, f"{name}_proj").bias,
            )
            new = (params[f"{own}_proj.weight"], params.get(f"{own}_proj.bias"))
            layer = eqx.tree_at(where, layer, new, is_leaf=lambda leaf: leaf is None)
        turn = lambda h: jax.vmap(eqx.nn.RotaryPositionalEmbedding(h.shape[-1], dtype=jnp.float64), 1, 1)(h)
        heads = (lambda q, k, v: (turn(q), turn(k), v)) if rotary else None
        seen = jnp.tri(x.shape[-2], dtype=bool) if causal else None
        one = lambda x, keys, values, mask: layer(x, keys, values, mask, process_heads=heads)
        mask = seen if mask is None else mask
        return jax.vmap(one, (0, 0, 0, None if mask is seen else 0))(x, keys, values, mask), {}

    return run


def of_haiku(params: Any, states: Any, inputs: Any, training: bool) -> Any:
    import haiku as hk

    x, keys, values, mask = sides(inputs)
    biased, width = "query_proj.bias" in params, params["query_proj.weight"].shape[0]

    def forward(x: Any, keys: Any, values: Any, mask: Any) -> Any:
        layer = hk.MultiHeadAttention(
            HEADS, width // HEADS, w_init=hk.initializers.Constant(0), with_bias=biased, model_size=x.shape[-1]
        )
        return layer(x, keys, values, mask)

    values_of = {}
    for own, name in (("query", "query"), ("key", "key"), ("value", "value"), ("out", "linear")):
        bias = {"b": params[f"{own}_proj.bias"]} if biased else {}
        values_of[f"multi_head_attention/{name}"] = {"w": params[f"{own}_proj.weight"].T} | bias
    mask = None if mask is None else mask[:, None] if mask.ndim == x.ndim else mask
    return hk.transform(forward).apply(values_of, None, x, keys, values, mask), {}


def in_steps(layer: Any, x: Any) -> jax.Array:
    """A prompt of two tokens, then token by token."""
    cache = layer.init_cache(x.shape[:-2], x.shape[-2])
    return jnp.concatenate([layer(part, cache=cache) for part in jnp.split(x, [*range(2, x.shape[-2])], axis=-2)], -2)


def rotary_of_equinox(params: Any, states: Any, inputs: Any, training: bool) -> Any:
    import equinox as eqx

    return jax.vmap(eqx.nn.RotaryPositionalEmbedding(6, dtype=jnp.float64))(inputs[0]), {}


def rotary_of_torch(params: Any, states: Any, inputs: Any, training: bool) -> Any:
    """Pairs of neighbors as complex numbers, as LLaMA as published turns them."""
    import torch

    x, positions = inputs
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    count = pairs.shape[-1]
    angle = positions[..., None] * 10000.0 ** (-torch.arange(count, dtype=torch.float64) / count)
    turned = pairs * torch.polar(torch.ones_like(angle), angle)
    return torch.view_as_real(turned).flatten(-2), {}


def masked(shape: tuple[int, ...], *arrays: tuple[int, ...]) -> Any:
    """Inputs, and a mask in which each target sees a source; that of its own number, where there is one."""

    def draw(rng: np.random.Generator) -> tuple[np.ndarray, ...]:
        sees = (rng.random(shape) < 0.5) | (np.arange(shape[-1]) == np.arange(shape[-2])[:, None] % shape[-1])
        return (*(rng.normal(size=a) for a in arrays), sees)

    return draw


def with_blind_targets(rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    mask = rng.random((2, 5, 5)) < 0.5
    mask[0, 1], mask[1, 3] = False, False
    return rng.normal(size=(2, 5, 8)), mask


def rotated(rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    return rng.normal(size=(2, 5, 6)), rng.integers(0, 100, (2, 5))


def attention(**options: Any) -> Any:
    return lambda: MultiHeadAttention(8, HEADS, key=key(), **options)


def normed() -> Any:
    norms = (nn.LayerNorm(2, eps=1e-6, use_bias=False) for _ in range(2))
    return attention(**dict(zip(("query_norm", "key_norm"), norms, strict=True)))()


def case(setting: str, make: Any, inputs: Any, peers: Any, call: Any = called) -> Case:
    # Training differs in dropout alone, whose draws no two libraries share.
    return Case("MultiHeadAttention", setting, make, inputs, peers, call, (False,))


SELF = normal((2, 5, 8))
OTHERS = {"Flax NNX": of_flax(), "Equinox": of_equinox(), "Haiku": of_haiku}
LAYERS = {"PyTorch": of_torch()} | OTHERS
FUNCTION = {"PyTorch": of_torch_function()}
CASES = [
    case("", attention(), SELF, LAYERS),
    case(
        "causal=True",
        attention(causal=True),
        SELF,
        {"PyTorch": of_torch(True), "Flax NNX": of_flax(True), "Equinox": of_equinox(True)},
    ),
    case(
        "mask of the batch",
        attention(),
        masked((2, 5, 5), (2, 5, 8)),
        FUNCTION | OTHERS,
    ),
    case(
        "mask of each head",
        attention(),
        masked((2, 4, 5, 5), (2, 5, 8)),
        FUNCTION | OTHERS,
    ),
    case("key_value", attention(), normal((2, 5, 8), (2, 7, 8)), LAYERS),
    case(
        "key_value, value, key_size=6, value_size=5",
        attention(key_size=6, value_size=5),
        normal((2, 5, 8), (2, 7, 6), (2, 7, 5)),
        {"PyTorch": of_torch(), "Equinox": of_equinox(), "Haiku": of_haiku},
    ),
    case(
        "use_bias=False",
        attention(use_bias=False),
        SELF,
        FUNCTION | OTHERS,
    ),
    case(
        "use_bias=['query', 'out']",
        attention(use_bias=["query", "out"]),
        SELF,
        FUNCTION | {"Equinox": of_equinox()},
    ),
    case(
        "head_dim=3",
        attention(head_dim=3),
        SELF,
        FUNCTION | OTHERS,
    ),
    case("num_kv_heads=2", attention(num_kv_heads=2), SELF, FUNCTION | {"Flax NNX": of_flax()}),
    case(
        "num_kv_heads=1, causal=True",
        attention(num_kv_heads=1, causal=True),
        SELF,
        {"PyTorch": of_torch_function(True), "Flax NNX": of_flax(True)},
    ),
    case("targets that see nothing", attention(), with_blind_targets, FUNCTION),
    case("query_norm, key_norm", normed, SELF, {"Flax NNX": of_flax()}),
    case(
        "rotary, causal=True",
        attention(rotary=RotaryEmbedding(2), causal=True),
        SELF,
        {"Equinox": of_equinox(True, True)},
    ),
    case("cache", attention(causal=True), SELF, {"PyTorch": of_torch(True), "Flax NNX": of_flax(steps=True)}, in_steps),
    case(
        "cache, num_kv_heads=2",
        attention(causal=True, num_kv_heads=2),
        SELF,
        {"PyTorch": of_torch_function(True), "Flax NNX": of_flax(steps=True)},
        in_steps,
    ),
    Case(
        "RotaryEmbedding",
        "",
        lambda: RotaryEmbedding(6),
        normal((2, 5, 6)),
        {"Equinox": rotary_of_equinox},
        training=(False,),
    ),
    Case(
        "RotaryEmbedding",
        "layout='interleaved', positions",
        lambda: RotaryEmbedding(6, layout="interleaved"),
        rotated,
        {"PyTorch": rotary_of_torch},
        training=(False,),
    ),
]
