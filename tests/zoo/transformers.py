# SPDX-License-Identifier: Apache-2.0
"""The transformers of the zoo beside their twins: cases, what is kept of each, and where it is stored.

As in oracle.py, whose measure it uses; the inputs may be ids, and the weights lie as they are published.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import tether
from tests.zoo import oracle
from tether.interop import torch as interop
from tether.interop._names import links
from tether.zoo._gpt2 import GPT2
from tether.zoo._vit import ViT

DATA = Path(__file__).parent / "data" / "transformers.npz"
BOUND = 1e-9  # float64 on both sides
NEW_TOKENS = 5


@dataclass(frozen=True)
class Case:
    """One model and its twin.

    Args:
        make: Builds the model of Tether from options.
        twin: Name of the class in tests/zoo/transformer_twins.py.
        options: Arguments of both, but for dropout, which both have off.
        inputs: A batch.
        published: How the tensors of the twin are loaded: arguments of interop.torch.load.
    """

    make: Callable[..., Any]
    twin: str
    options: Mapping[str, Any]
    inputs: np.ndarray
    published: Mapping[str, Any] = field(default_factory=dict)

    def model(self, dtype: Any = np.float64, **options: Any) -> Any:
        """The model with the weights that its twin has."""
        options = {"dropout": 0.0, **self.options, **options}
        model = tether.eval_shape(lambda: self.make(key=jax.random.key(0), dtype=dtype, **options))
        interop.load(model, weights(self.shapes(model)), **self.published)
        return model

    def shapes(self, model: Any) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the twin's tensors."""
        own = [link for link in links(model) if not link.alternative]
        found = [pair for link in own for pair in zip(link.names, link.specs(), strict=True)]
        turned = lambda name, shape: shape[::-1] if self.is_transposed(name) else shape
        return {name: turned(name, spec.shape) for name, spec in found}

    def is_transposed(self, name: str) -> bool:
        return any(re.search(pattern, name) for pattern in self.published.get("transforms", ()))


SMALL = {"vocab_size": 13, "num_positions": 12, "embed_dim": 8, "num_layers": 2, "num_heads": 2}
PATCHED = {"image_size": 12, "patch_size": 4, "num_layers": 2, "num_heads": 2, "embed_dim": 8, "mlp_dim": 6}
CASES = {
    "gpt2": Case(GPT2, "GPT2", SMALL, np.random.default_rng(0).integers(0, 13, (3, 7)), GPT2.published),
    "vit": Case(ViT, "ViT", {**PATCHED, "num_classes": 3}, np.random.default_rng(0).normal(size=(4, 3, 12, 12))),
}


def weights(shapes: Mapping[str, tuple[int, ...]]) -> oracle.Arrays:
    """As in oracle.py, but for biases around zero and longer vectors of tokens: else GPT-2 repeats one of them."""
    found = oracle.weights(shapes)
    scale = lambda name: 4 if name == "wte.weight" else 1
    shift = lambda name: 0.5 if name.endswith("bias") else 0
    return {name: value * scale(name) - shift(name) for name, value in found.items()}


def of_tether(case: Case) -> oracle.Arrays:
    """Outputs in both modes and gradients, under the names of the twin's tensors; of GPT-2 also what it writes."""
    model = case.model()
    x = jnp.asarray(case.inputs)

    def loss(model: Any) -> tuple[jax.Array, jax.Array]:
        y = model(x)
        return (jnp.asarray(oracle.cotangent(y)) * y).sum(), y

    grads, y = tether.jit(tether.grad(loss, has_aux=True))(model.train())
    found = {"evaluation output": np.asarray(tether.jit(model.eval())(x)), "training output": np.asarray(y)}
    for name, grad in interop.state_dict(grads).items():
        found[f"gradient {name}"] = grad.T if case.is_transposed(name) else grad
    if isinstance(model, GPT2):
        found["tokens"] = np.asarray(model.generate(x, NEW_TOKENS)).astype(np.float64)
    return found


def stored() -> dict[str, oracle.Arrays]:
    """Case -> sketches of what its twin gave when the data were made."""
    found: dict[str, oracle.Arrays] = {}
    with np.load(DATA) as file:
        for name, sizes in json.loads(str(file["index"])).items():
            parts = np.split(file[name], np.cumsum(list(sizes.values()))[:-1])
            found[name] = dict(zip(sizes, parts, strict=True))
    return found


def store(found: Mapping[str, oracle.Arrays]) -> None:
    """Writes one vector for each case, and an index of what is in it."""
    index = {case: {name: array.size for name, array in arrays.items()} for case, arrays in found.items()}
    vectors = {case: np.concatenate(list(arrays.values())) for case, arrays in found.items()}
    np.savez_compressed(DATA, index=json.dumps(index), **vectors)
