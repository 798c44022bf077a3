# SPDX-License-Identifier: Apache-2.0
"""Where a layer of PyTorch names or lays out what it holds in another way than the layer here: a table, by class."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from tether._modules import Module
from tether.nn import BatchNorm, Sequential
from tether.nn._attention import MultiHeadAttention
from tether.nn._cells import Cell
from tether.nn._conv_transpose import ConvTranspose
from tether.nn._group_norm import InstanceNorm
from tether.nn._rnn import RNN, Bidirectional
from tether.nn._spectral_norm import SpectralNorm
from tether.nn._weight_norm import WeightNorm

Convert = Callable[[list[np.ndarray]], list[np.ndarray]]


def same(arrays: list[np.ndarray]) -> list[np.ndarray]:
    """For tensors and cells of one layout."""
    return arrays


class Layout(NamedTuple):
    """How tensors of a layer of PyTorch hold what cells of a layer hold here.

    Attributes:
        names: Of the tensors, below the layer.
        paths: Of the cells, below the layer.
        read: Tensors to values of the cells; ``write`` the other way. What shapes they give depends on shapes alone.
        alternative: Whether these are other names, which are read but not written.
    """

    names: tuple[str, ...]
    paths: tuple[str, ...]
    read: Convert = same
    write: Convert = same
    alternative: bool = False


def _statistics(_: InstanceNorm) -> list[Layout]:
    return [Layout(("running_mean",), ("mean",)), Layout(("running_var",), ("var",))]


def _batchnorm(layer: BatchNorm) -> list[Layout]:
    size = layer.size
    spread = lambda tensors: [np.full(size, tensors[0])]
    most = lambda values: [np.asarray(values[0].max(), np.int64)]
    counted = Layout(("num_batches_tracked",), ("count",), spread, most)
    return [Layout(("running_mean",), ("mean",)), Layout(("running_var",), ("var",)), counted]


def _conv_transpose(layer: ConvTranspose) -> list[Layout]:
    if layer.convention == "gradient":  # PyTorch's
        return []
    space = tuple(range(2, 2 + layer.num_spatial_dims))
    flip = lambda arrays: [np.flip(arrays[0], space)]
    return [Layout(("weight",), ("weight",), flip, flip)]


def _attention(layer: MultiHeadAttention) -> list[Layout]:
    projections = ("query_proj", "key_proj", "value_proj")
    width, kv_width = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
    apart = lambda tensors: np.split(tensors[0], [width, width + kv_width])
    joined = lambda values: [np.concatenate(values)]
    weights, biases = (tuple(f"{part}.{name}" for part in projections) for name in ("weight", "bias"))
    own = [Layout((path,), (path,), alternative=True) for path in (*weights, *biases)]
    in_bias = Layout(("in_proj_bias",), biases, apart, joined)
    if layer.embed_dim == layer.key_size == layer.value_size:
        return [Layout(("in_proj_weight",), weights, apart, joined), in_bias, *own]
    names = [f"{part}_proj_weight" for part in "qkv"]
    return [*(Layout((name,), (path,)) for name, path in zip(names, weights, strict=True)), in_bias, *own]


def _recurrent(cells: Sequence[tuple[str, str]]) -> list[Layout]:
    """The parameters of cells at these paths, under these endings."""
    parts = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    return [Layout((f"{part}_{end}",), (f"{path}.{part}",)) for path, end in cells for part in parts]


def _of_layer(layer: Any, path: str, number: int) -> list[tuple[str, str]]:
    """The cells of one layer of a recurrent network, and the endings of their names in PyTorch."""
    if isinstance(layer, Bidirectional):
        pairs = [(layer.forward, "forward.cell", ""), (layer.backward, "backward.cell", "_reverse")]
    else:
        pairs = [(layer, "cell", "_reverse" if layer.reverse else "")]
    return [(f"{path}{cell}", f"l{number}{end}") for rnn, cell, end in pairs if isinstance(rnn.cell, Cell)]


def _rnn(layer: RNN | Bidirectional) -> list[Layout]:
    return _recurrent(_of_layer(layer, "", 0))


def _sequential(layer: Sequential) -> list[Layout]:
    """A Sequential of nothing but recurrent layers is one module of PyTorch, with num_layers."""
    layers = list(layer)
    if not all(isinstance(part, RNN | Bidirectional) for part in layers):
        return []
    return _recurrent([cell for i, part in enumerate(layers) for cell in _of_layer(part, f"[{i}].", i)])


def _weight_norm(layer: WeightNorm) -> list[Layout]:
    of, name, v = _wrapped(layer)
    rank = np.ndim(layer.scale)
    # For one length in all PyTorch has a number, and here it has the axes of the weight.
    read = same if layer.axes else lambda tensors: [tensors[0].reshape((1,) * rank)]
    write = same if layer.axes else lambda values: [values[0].reshape(())]
    return [
        Layout((f"{of}parametrizations.{name}.original0",), ("scale",), read, write),
        Layout((f"{of}parametrizations.{name}.original1",), v),
        Layout((f"{of}{name}_g",), ("scale",), read, write, alternative=True),
        Layout((f"{of}{name}_v",), v, alternative=True),
    ]


def _spectral_norm(layer: SpectralNorm) -> list[Layout]:
    of, name, weight = _wrapped(layer)
    new, old = f"{of}parametrizations.{name}", f"{of}{name}"
    cells = {".original": ("_orig", weight), ".0._u": ("_u", ("u",)), ".0._v": ("_v", ("v",))}
    own = [Layout((new + end,), cell) for end, (_, cell) in cells.items()]
    return own + [Layout((old + end,), cell, alternative=True) for end, cell in cells.values()]


def _wrapped(layer: WeightNorm | SpectralNorm) -> tuple[str, str, tuple[str]]:
    """Of the weight: where it is in the layer, with a dot at the end; its name there; its path from the wrapper."""
    head, dot, name = layer.name.rpartition(".")
    return head + dot, name, (f"layer.{layer.name}",)


# A layer whose tensors in PyTorch have its own names and layout needs no row.
LAYOUTS: dict[type[Module], Callable[[Any], list[Layout]]] = {
    BatchNorm: _batchnorm,
    Bidirectional: _rnn,
    ConvTranspose: _conv_transpose,
    InstanceNorm: _statistics,
    MultiHeadAttention: _attention,
    RNN: _rnn,
    Sequential: _sequential,
    SpectralNorm: _spectral_norm,
    WeightNorm: _weight_norm,
}

# Layers around a layer, which PyTorch has not: what lies in ``norm.layer`` here is in ``norm`` there.
WRAPPERS = (SpectralNorm, WeightNorm)


def layouts_of(module: Module) -> list[Layout]:
    """What the table says of a module; a subclass has the rows of its base."""
    row = next((LAYOUTS[cls] for cls in type(module).__mro__ if cls in LAYOUTS), None)
    return [] if row is None else row(module)
