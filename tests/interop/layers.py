# SPDX-License-Identifier: Apache-2.0
"""Layers and their twins in torch.nn, and what those hold and give: data/layers.npz.

usage: python -m tests.interop.layers          (writes the data; it needs the ``parity`` extra)
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

import tether
from tether import nn
from tether.nn._attention import MultiHeadAttention
from tether.nn._cells import GRUCell, LSTMCell, SimpleCell
from tether.nn._conv_transpose import ConvTranspose1d, ConvTranspose2d
from tether.nn._group_norm import InstanceNorm
from tether.nn._rnn import RNN, Bidirectional
from tether.nn._spectral_norm import SpectralNorm
from tether.nn._weight_norm import WeightNorm

DATA = Path(__file__).parent / "data" / "layers.npz"


@dataclass(frozen=True)
class Case:
    """A layer, and its twin.

    Args:
        make: Builds the layer.
        twin: Builds the twin, of the module torch.
        shapes: Of the inputs.
        first: Whether the twin gives a tuple, of which the first is the output.
        old_names: Whether the twin has names that are read and no longer written.
    """

    make: Callable[[], tether.Module]
    twin: Callable[[Any], Any]
    shapes: tuple[tuple[int, ...], ...]
    first: bool = False
    old_names: bool = False

    def inputs(self) -> list[np.ndarray]:
        rng = np.random.default_rng(0)
        return [rng.normal(size=shape).astype(np.float32) for shape in self.shapes]


def key(seed: int = 7) -> jax.Array:
    return jax.random.key(seed)


def both(cell: Any, sizes: tuple[int, int]) -> Bidirectional:
    return Bidirectional(RNN(cell(*sizes, key=key())), RNN(cell(*sizes, key=key(8)), reverse=True))


def parametrized(torch: Any, name: str, layer: Any, *args: Any, **options: Any) -> Any:
    return getattr(torch.nn.utils.parametrizations, name)(layer, *args, **options)


def old(torch: Any, name: str, layer: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what is tested is that its files can still be read
        return getattr(torch.nn.utils, name)(layer)


SEQUENCE = ((2, 5, 3),)
RNNS = {
    "RNN": Case(
        lambda: RNN(SimpleCell(3, 4, key=key())), lambda t: t.nn.RNN(3, 4, batch_first=True), SEQUENCE, first=True
    ),
    "GRU": Case(
        lambda: RNN(GRUCell(3, 4, use_bias=False, key=key())),
        lambda t: t.nn.GRU(3, 4, bias=False, batch_first=True),
        SEQUENCE,
        first=True,
    ),
    "LSTM of two layers in both directions": Case(
        lambda: nn.Sequential([both(LSTMCell, (3, 4)), both(LSTMCell, (8, 4))]),
        lambda t: t.nn.LSTM(3, 4, 2, batch_first=True, bidirectional=True),
        SEQUENCE,
        first=True,
    ),
    "LSTM, then Linear": Case(
        lambda: nn.Sequential([RNN(LSTMCell(3, 4, key=key())), nn.Linear(4, 2)]),
        lambda t: t.nn.ModuleDict({"0": t.nn.LSTM(3, 4, batch_first=True), "1": t.nn.Linear(4, 2)}),
        SEQUENCE,
    ),
}
QKV = ((2, 5, 4), (2, 3, 6), (2, 3, 2))
ATTENTION = {
    "attention": Case(
        lambda: MultiHeadAttention(4, 2, key=key()),
        lambda t: t.nn.MultiheadAttention(4, 2, batch_first=True),
        ((2, 5, 4), (2, 3, 4), (2, 3, 4)),
        first=True,
    ),
    "attention without bias": Case(
        lambda: MultiHeadAttention(4, 2, use_bias=False, key=key()),
        lambda t: t.nn.MultiheadAttention(4, 2, bias=False, batch_first=True),
        ((2, 5, 4), (2, 3, 4), (2, 3, 4)),
        first=True,
    ),
    "attention of other sizes": Case(
        lambda: MultiHeadAttention(4, 2, key_size=6, value_size=2, key=key()),
        lambda t: t.nn.MultiheadAttention(4, 2, kdim=6, vdim=2, batch_first=True),
        QKV,
        first=True,
    ),
}
NORMS = {
    "BatchNorm": Case(lambda: nn.BatchNorm(3), lambda t: t.nn.BatchNorm1d(3), ((4, 3),)),
    "InstanceNorm": Case(
        lambda: InstanceNorm(3, affine=True, track_running_stats=True),
        lambda t: t.nn.InstanceNorm1d(3, affine=True, track_running_stats=True),
        ((2, 3, 5),),
    ),
    "WeightNorm": Case(
        lambda: WeightNorm(nn.Linear(3, 4, key=key())),
        lambda t: parametrized(t, "weight_norm", t.nn.Linear(3, 4)),
        ((2, 3),),
    ),
    "WeightNorm of one length": Case(
        lambda: WeightNorm(nn.Conv1d(3, 4, 2, key=key()), axis=None),
        lambda t: parametrized(t, "weight_norm", t.nn.Conv1d(3, 4, 2), dim=None),
        ((2, 3, 5),),
    ),
    "WeightNorm under its old names": Case(
        lambda: nn.Sequential([WeightNorm(nn.Linear(3, 4, key=key()))]),
        lambda t: t.nn.Sequential(old(t, "weight_norm", t.nn.Linear(3, 4))),
        ((2, 3),),
        old_names=True,
    ),
    "SpectralNorm": Case(
        lambda: nn.Sequential([SpectralNorm(nn.Conv1d(3, 4, 2, key=key()), key=key())]),
        lambda t: t.nn.Sequential(parametrized(t, "spectral_norm", t.nn.Conv1d(3, 4, 2))),
        ((2, 3, 5),),
    ),
    "SpectralNorm under its old names": Case(
        lambda: SpectralNorm(nn.Linear(3, 4, key=key()), key=key()),
        lambda t: old(t, "spectral_norm", t.nn.Linear(3, 4)),
        ((2, 3),),
        old_names=True,
    ),
}
TRANSPOSED = {
    "ConvTranspose": Case(
        lambda: ConvTranspose2d(4, 6, (3, 2), 2, groups=2, key=key()),
        lambda t: t.nn.ConvTranspose2d(4, 6, (3, 2), 2, groups=2),
        ((2, 4, 5, 3),),
    ),
    "ConvTranspose the other way round": Case(
        lambda: ConvTranspose1d(2, 3, 3, convention="correlation", key=key()),
        lambda t: t.nn.ConvTranspose1d(2, 3, 3),
        ((2, 2, 5),),
    ),
}
CASES = RNNS | ATTENTION | NORMS | TRANSPOSED


def of_torch(case: Case) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """The state_dict of the twin, and its output in evaluation."""
    import torch

    torch.manual_seed(0)
    twin = case.twin(torch)
    with torch.no_grad():
        for name, x in [*twin.named_parameters(), *twin.named_buffers()]:
            if x.ndim == 1 and name.endswith(("running_mean", "weight", "bias")):
                x.normal_()
            if name.endswith("running_var"):
                x.uniform_(1, 2)
        twin, inputs = twin.eval(), [torch.tensor(x) for x in case.inputs()]
        if isinstance(twin, torch.nn.ModuleDict):
            y = twin["1"](twin["0"](*inputs)[0])
        else:
            y = twin(*inputs)
        y = y[0] if case.first else y
    return {name: x.numpy().copy() for name, x in twin.state_dict().items()}, y.numpy()


@functools.cache
def stored() -> dict[str, tuple[dict[str, np.ndarray], np.ndarray]]:
    """Case -> tensors and output of the twin when the data were made."""
    found: dict[str, tuple[dict[str, np.ndarray], np.ndarray]] = {}
    with np.load(DATA) as file:
        for name in CASES:
            prefix = f"{name}|"
            tensors = {entry.removeprefix(prefix): file[entry] for entry in file.files if entry.startswith(prefix)}
            found[name] = (tensors, tensors.pop("|output"))
    return found


def main() -> None:
    arrays = {}
    for name, case in CASES.items():
        tensors, y = of_torch(case)
        arrays |= {f"{name}|{n}": x for n, x in tensors.items()} | {f"{name}||output": y}
    DATA.parent.mkdir(exist_ok=True)
    np.savez_compressed(DATA, **arrays)
    print(f"{len(CASES)} cases, {DATA.stat().st_size} bytes")


if __name__ == "__main__":
    main()
