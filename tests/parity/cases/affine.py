# SPDX-License-Identifier: Apache-2.0
"""Linear, Bilinear, Embedding, PReLU, LoRA, MLP."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.parity.harness import Case, normal
from tether import nn


def key() -> jax.Array:
    return jax.random.key(0)


def linear_of_torch(params: Any, states: Any, inputs: Any, training: bool) -> Any:
    import torch

    return torch.nn.functional.linear(inputs[0], params["weight"], params.get("bias")), {}


def linear_of_flax(params: Any, states: Any, inputs: Any, training: bool) -> Any:
    from flax import nnx

    size = params["weight"].shape
    layer = nnx.Linear(size[1], size[0], use_bias="bias" in params, param_dtype=jnp.float64, rngs=nnx.Rngs(0))
    layer.kernel[...] = params["weight"].T
    if "bias" in params:
        layer.bias[...] = params["bias"]
    return layer(inputs[0]), {}


def linear_of_equinox(params: Any, states: Any, inputs: Any, training: bool) -> Any:
    import equinox as eqx

    size = params["weight"].shape
    layer = eqx.nn.Linear(size[1], size[0], use_bias="bias" in params, key=key())
    layer = eqx.tree_at(
        lambda layer: (layer.weight, layer.bias),
        layer,
        (params["weight"], params.get("bias")),
        is_leaf=lambda x: x is None,
    )
    for _ in range(inputs[0].ndim - 1):
        layer = jax.vmap(layer)
    return layer(inputs[0]), {}


def linear_of_haiku(params: Any, states: Any, inputs: Any, training: bool) -> Any:
    import haiku as hk

    forward = hk.transform(lambda x: hk.Linear(params["weight"].shape[0], with_bias="bias" in params)(x))
    values = {"w": params["weight"].T} | ({"b": params["bias"]} if "bias" in params else {})
    return forward.apply({"linear": values}, None, inputs[0]), {}


LINEAR = {
    "PyTorch": linear_of_torch,
    "Flax NNX": linear_of_flax,
    "Equinox": linear_of_equinox,
    "Haiku": linear_of_haiku,
}


def embedding_of_torch(params: Any, states: Any, inputs: Any, training: bool) -> Any:
    import torch

    return torch.nn.functional.embedding(inputs[0].long(), params["weight"]), {}


def embedding_of_flax(params: Any, states: Any, inputs: Any, training: bool) -> Any:
    from flax import nnx

    layer = nnx.Embed(*params["weight"].shape, param_dtype=jnp.float64, rngs=nnx.Rngs(0))
    layer.embedding[...] = params["weight"]
    return layer(inputs[0]), {}


def embedding_of_equinox(params: Any, states: Any, inputs: Any, training: bool) -> Any:
    import equinox as eqx

    layer = eqx.nn.Embedding(weight=params["weight"])
    return jax.vmap(jax.vmap(layer))(inputs[0]), {}


def embedding_of_haiku(params: Any, states: Any, inputs: Any, training: bool) -> Any:
    import haiku as hk

    forward = hk.transform(lambda x: hk.Embed(*params["weight"].shape)(x))
    return forward.apply({"embed": {"embeddings": params["weight"]}}, None, inputs[0]), {}


def bilinear_of_torch(params: Any, states: Any, inputs: Any, training: bool) -> Any:
    import torch

    return torch.nn.functional.bilinear(*inputs, params["weight"], params.get("bias")), {}


def prelu_of_torch(params: Any, states: Any, inputs: Any, training: bool) -> Any:
    import torch

    return torch.nn.functional.prelu(inputs[0], params["weight"]), {}


def prelu_of_flax(params: Any, states: Any, inputs: Any, training: bool) -> Any:
    from flax import nnx

    layer = nnx.PReLU(param_dtype=jnp.float64)
    layer.negative_slope[...] = params["weight"][0]
    return layer(inputs[0]), {}


def prelu_of_equinox(params: Any, states: Any, inputs: Any, training: bool) -> Any:
    import equinox as eqx

    layer = eqx.tree_at(lambda layer: layer.negative_slope, eqx.nn.PReLU(), params["weight"][0])
    return layer(inputs[0]), {}


def lora_of_flax(params: Any, states: Any, inputs: Any, training: bool) -> Any:
    from flax import nnx

    rank, size = params["a"].shape
    layer = nnx.LoRA(size, rank, params["b"].shape[0], param_dtype=jnp.float64, rngs=nnx.Rngs(0))
    layer.lora_a[...], layer.lora_b[...] = params["a"].T, params["b"].T
    base = jax.lax.stop_gradient((params["layer.weight"], params["layer.bias"]))
    return inputs[0] @ base[0].T + base[1] + layer(inputs[0]), {}


def mlp_of_torch(params: Any, states: Any, inputs: Any, training: bool) -> Any:
    import torch

    h = inputs[0]
    for i in range(3):
        h = torch.nn.functional.linear(h, params[f"layers[{i}].weight"], params[f"layers[{i}].bias"])
        h = torch.tanh(h) if i < 2 else h
    return h, {}


def mlp_of_equinox(params: Any, states: Any, inputs: Any, training: bool) -> Any:
    import equinox as eqx

    model = eqx.nn.MLP(4, 2, 5, 2, jnp.tanh, key=key())
    where = lambda model: [a for layer in model.layers for a in (layer.weight, layer.bias)]
    model = eqx.tree_at(where, model, [params[f"layers[{i}].{n}"] for i in range(3) for n in ("weight", "bias")])
    return jax.vmap(model)(inputs[0]), {}


def mlp_of_haiku(params: Any, states: Any, inputs: Any, training: bool) -> Any:
    import haiku as hk

    values = {
        f"mlp/~/linear_{i}": {"w": params[f"layers[{i}].weight"].T, "b": params[f"layers[{i}].bias"]} for i in range(3)
    }
    return hk.transform(lambda x: hk.nets.MLP([5, 5, 2], activation=jnp.tanh)(x)).apply(values, None, inputs[0]), {}


def ids(rng: np.random.Generator) -> tuple[np.ndarray]:
    return (rng.integers(0, 7, (2, 3)).astype(np.int32),)


CASES = [
    Case("Linear", "", lambda: nn.Linear(5, 3, key=key()), normal((4, 5)), LINEAR),
    Case("Linear", "use_bias=False", lambda: nn.Linear(5, 3, use_bias=False, key=key()), normal((2, 4, 5)), LINEAR),
    Case(
        "Embedding",
        "",
        lambda: nn.Embedding(7, 4, key=key()),
        ids,
        {
            "PyTorch": embedding_of_torch,
            "Flax NNX": embedding_of_flax,
            "Equinox": embedding_of_equinox,
            "Haiku": embedding_of_haiku,
        },
    ),
    Case(
        "Bilinear", "", lambda: nn.Bilinear(5, 4, 3, key=key()), normal((2, 5), (2, 4)), {"PyTorch": bilinear_of_torch}
    ),
    Case(
        "Bilinear",
        "use_bias=False",
        lambda: nn.Bilinear(5, 4, 3, use_bias=False, key=key()),
        normal((2, 3, 5), (2, 3, 4)),
        {"PyTorch": bilinear_of_torch},
    ),
    Case(
        "PReLU",
        "",
        nn.PReLU,
        normal((3, 4)),
        {"PyTorch": prelu_of_torch, "Flax NNX": prelu_of_flax, "Equinox": prelu_of_equinox},
    ),
    Case("PReLU", "num_parameters=3", lambda: nn.PReLU(3), normal((2, 3, 4)), {"PyTorch": prelu_of_torch}),
    Case(
        "LoRA",
        "rank=2",
        lambda: nn.LoRA(nn.Linear(5, 3, key=key()), 2, key=key()),
        normal((4, 5)),
        {"Flax NNX": lora_of_flax},
        without={"Flax NNX": ("gradient of layer.",)},  # frozen
    ),
    Case(
        "MLP",
        "activation=tanh, depth=2",
        lambda: nn.MLP(4, 2, 5, 2, jnp.tanh, key=key()),
        normal((3, 4)),
        {"PyTorch": mlp_of_torch, "Equinox": mlp_of_equinox, "Haiku": mlp_of_haiku},
    ),
]
