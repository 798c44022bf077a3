# SPDX-License-Identifier: Apache-2.0
"""Linear and Embedding."""

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
        lambda layer: (layer.weight, layer.bias), layer, (params["weight"], params.get("bias")), is_leaf=lambda x: x is None
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
        {"PyTorch": embedding_of_torch, "Flax NNX": embedding_of_flax},
    ),
]
