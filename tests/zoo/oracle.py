# SPDX-License-Identifier: Apache-2.0
"""The cases of the zoo: each model, its twin in PyTorch, inputs and weights, and the measure that compares them.

Weights are drawn from the name of the tensor, so that data/twins.npz holds only what the twins give: in training the
output, the gradients and the statistics afterwards, then the output in evaluation.
"""

from __future__ import annotations

import contextlib
import functools
import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import tether
from tests.parity.harness import gap
from tether import zoo
from tether.interop import torch as interop
from tether.interop._names import links

DATA = Path(__file__).parent / "data" / "twins.npz"
BOUND = 1e-9  # float64 on both sides

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Case:
    """One model and its twin.

    Args:
        make: Builds the model of Tether from options.
        twin: Name of the class in tests/zoo/twins.py.
        options: Arguments of both.
        shape: Of a batch of inputs.
        tokens: How many there are, where inputs are ids.
    """

    make: Callable[..., tether.Module]
    twin: str
    options: Mapping[str, Any] = field(default_factory=dict)
    shape: tuple[int, ...] = (4, 3, 64, 64)
    tokens: int = 0

    def model(self, dtype: Any = np.float64) -> tether.Module:
        """The model with the weights that its twin has; they are loaded into shapes, which takes no time to draw."""
        model = tether.eval_shape(lambda: self.make(key=jax.random.key(0), dtype=dtype, **self.options))
        once = {link.variables: link for link in reversed(links(model))}.values()  # a tied cell by its first name
        shapes = {name: x.shape for link in once for name, x in zip(link.names, link.specs(), strict=True)}
        interop.load(model, weights(shapes))
        return model

    def inputs(self) -> np.ndarray:
        rng = np.random.default_rng(1)
        return rng.integers(0, self.tokens, self.shape).astype(np.int32) if self.tokens else rng.normal(size=self.shape)


NARROW = {"num_classes": 3, "width": 2}
GROUPED = {"depths": (2, 1, 1, 1), "block": "bottleneck", "base_width": 128, "groups": 2, "in_channels": 1, **NARROW}
WIDE = {"depth": 10, "width": 2, "num_classes": 3, "base_width": 2}
THIN = {"depth": 16, "width": 1, "num_classes": 3, "base_width": 2, "in_channels": 1}
TIED = {"vocab_size": 7, "hidden_size": 4, "num_layers": 1, "cell": "gru", "tie_weights": True}
CASES = {
    "basic": Case(zoo.ResNet, "ResNet", {"depths": (1, 2, 1, 1), "block": "basic", **NARROW}),
    "bottleneck": Case(zoo.ResNet, "ResNet", GROUPED, (4, 1, 64, 48)),
    "wide": Case(zoo.WideResNet, "WideResNet", WIDE, (4, 3, 16, 16)),
    "thin": Case(zoo.WideResNet, "WideResNet", THIN, (4, 1, 16, 16)),
    "LSTM": Case(zoo.CharRNN, "CharRNN", {"vocab_size": 7, "hidden_size": 4, "num_layers": 2}, (2, 5), 7),
    "GRU": Case(zoo.CharRNN, "CharRNN", TIED, (2, 5), 7),
    "ConvNet": Case(zoo.ConvNet, "ConvNet", {"channels": (3, 5), "num_classes": 4, "in_channels": 2}, (4, 2, 9, 8)),
}


def weights(shapes: Mapping[str, tuple[int, ...]]) -> Arrays:
    """Values for tensors, each drawn by its name; a variance is positive."""
    found = {}
    for name, shape in shapes.items():
        if name.endswith("num_batches_tracked"):
            continue
        value = np.random.default_rng(zlib.crc32(name.encode())).normal(size=shape)
        scale = np.sqrt(2 / max(1, np.prod(shape[1:]))) if len(shape) > 1 else 0.5
        found[name] = np.exp(value * 0.5) if name.endswith("running_var") else value * scale + (len(shape) == 1) * 0.5
    return found


def cotangent(y: Any) -> np.ndarray:
    """Weights of the sum that is differentiated: a plain sum has a gradient of zero before a BatchNorm."""
    return np.random.default_rng(2).normal(size=y.shape)


@contextlib.contextmanager
def quickly_compiled() -> Iterator[None]:
    """A block in which XLA leaves out most of its passes: these programs run once."""
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", before)


def of_tether(case: Case, dtype: Any = np.float64) -> Arrays:
    """What the model gives, under the names of the twin's tensors; loaded by interop.torch."""
    model = case.model(dtype)
    x = case.inputs() if case.tokens else jnp.asarray(case.inputs(), dtype)

    def loss(model: Any) -> tuple[jax.Array, jax.Array]:
        y = model(x)
        return (jnp.asarray(cotangent(y), y.dtype) * y).sum(), y

    @tether.jit
    def run(model: Any) -> Any:
        of = tether.grad(loss, has_aux=True)
        return of(model.eval()), of(model.train())

    found: Arrays = {}
    with quickly_compiled():
        both = run(model)
    for mode, (grads, y) in zip(("evaluation", "training"), both, strict=True):
        found[f"{mode} output"] = np.asarray(y)
        found |= {f"{mode} gradient {name}": g for name, g in interop.state_dict(grads, select=tether.Param).items()}
    found |= {f"training statistics {n}": x for n, x in interop.state_dict(model, select=tether.State).items()}
    return found


def sketch(array: np.ndarray) -> np.ndarray:
    """A large array by four sums of it with random weights: enough to see any difference, and small."""
    if array.size <= 16:
        return np.ravel(array)
    return np.random.default_rng(3).normal(size=(4, array.size)) @ np.ravel(array).astype(np.float64)


def differences(ours: Arrays, theirs: Arrays) -> dict[str, float]:
    """The largest difference in each array, relative to the largest value of theirs, or to 1 if that is larger."""
    if ours.keys() != theirs.keys():
        raise ValueError(f"names differ: {sorted(ours.keys() ^ theirs.keys())}")
    return {name: gap(sketch(ours[name]), right) for name, right in theirs.items()}


@functools.cache
def stored() -> dict[str, Arrays]:
    """Case -> sketches of what its twin gave when the data were made."""
    found: dict[str, Arrays] = {}
    with np.load(DATA) as file:
        for name, sizes in json.loads(str(file["index"])).items():
            parts = np.split(file[name], np.cumsum(list(sizes.values()))[:-1])
            found[name] = dict(zip(sizes, parts, strict=True))
    return found


def store(found: Mapping[str, Arrays]) -> None:
    """Writes one vector for each case, and an index of what is in it."""
    index = {case: {name: array.size for name, array in arrays.items()} for case, arrays in found.items()}
    vectors = {case: np.concatenate(list(arrays.values())) for case, arrays in found.items()}
    np.savez_compressed(DATA, index=json.dumps(index), **vectors)
