# SPDX-License-Identifier: Apache-2.0
"""The layers of the networks in NumPy, float64, slowly: what the tests of the zoo compare with."""

from __future__ import annotations

import numpy as np


def weights(network):
    """The values of a network's variables by name, in float64, drawn so that none is as its layer begins."""
    generator = np.random.default_rng(0)
    found = {}
    for name, variable in network.vars().items():
        scale = 0.4 if variable.ndim > 1 else 0.2
        value = (generator.normal(size=variable.shape) * scale).astype(np.float32)
        if name.endswith(("gamma", "running_var")):
            value = 1 + np.abs(value)
        found[name] = value
    return found


def conv(x, w, stride=1, pad: int | tuple[int, int] = 0, bias: float | np.ndarray = 0.0):
    """Images [batch, channels, height, width] and a kernel [height, width, channels, out]."""
    low, high = pad if isinstance(pad, tuple) else (pad, pad)
    x = np.pad(x, ((0, 0), (0, 0), (low, high), (low, high)))
    height, width = w.shape[:2]
    rows = range(0, x.shape[2] - height + 1, stride)
    columns = range(0, x.shape[3] - width + 1, stride)
    w = w.transpose(2, 0, 1, 3)
    y = [[np.tensordot(x[:, :, r : r + height, c : c + width], w, 3) for c in columns] for r in rows]
    return np.array(y).transpose(2, 3, 0, 1) + bias


def max_pool(x, size, stride):
    """The maximum of each window that fits."""
    rows = range(0, x.shape[2] - size + 1, stride)
    columns = range(0, x.shape[3] - size + 1, stride)
    y = [[x[:, :, r : r + size, c : c + size].max((2, 3)) for c in columns] for r in rows]
    return np.array(y).transpose(2, 3, 0, 1)


def same(length, size, stride):
    """How TensorFlow's SAME pads an axis."""
    total = max((-(-length // stride) - 1) * stride + size - length, 0)
    return total // 2, total - total // 2


def batch_norm(x, norm, eps, training):
    """With the statistics of the batch, or with the running ones."""
    mean = x.mean((0, 2, 3), keepdims=True) if training else norm["running_mean"]
    var = x.var((0, 2, 3), keepdims=True) if training else norm["running_var"]
    return norm["gamma"] * (x - mean) / np.sqrt(var + eps) + norm["beta"]


def part(values, prefix):
    """The values below a prefix, by the last part of their names, in float64."""
    found = {name.rpartition(".")[2]: v.astype(np.float64) for name, v in values.items() if name.startswith(prefix)}
    if not found:
        raise KeyError(prefix)
    return found
