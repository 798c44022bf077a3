# SPDX-License-Identifier: Apache-2.0
"""The table of all layers: one row for each, and one for each shape of it that could obey a law differently.

A new layer is in the laws when it has a row here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

import tether
from tether import nn

BATCH = 6


@dataclass(frozen=True)
class Layer:
    """One layer and what the laws must know of it.

    Args:
        name: Of the row.
        make: Builds the layer, the same one each time.
        input: Gives a batch, BATCH examples along axis 0.
        wrong: Shapes of whole inputs, batch axes included, that the layer must refuse.
        floating: Whether it takes floating input, and returns the same dtype.
        any_batch: Whether any number of batch axes may lead, none included.
        blames: Pattern of the class that an error names, where a part of the layer finds the fault.
    """

    name: str
    make: Callable[[], tether.Module]
    input: Callable[[], np.ndarray]
    wrong: tuple[tuple[int, ...], ...] = ()
    floating: bool = True
    any_batch: bool = True
    blames: str = ""


def normal(*shape: int) -> Callable[[], np.ndarray]:
    """A batch of examples of this shape, the same each time; values far from ties, for the maxima."""
    return lambda: np.random.default_rng(sum(shape)).normal(size=(BATCH, *shape)).astype(np.float32)


def _ids() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 7, (BATCH, 3)).astype(np.int32)


def _key() -> jax.Array:
    return jax.random.key(5)


def _mixed() -> tether.Module:
    k1, k2 = jax.random.split(_key())
    return nn.Sequential(
        [
            nn.Conv2d(1, 4, 3, padding="SAME", key=k1),
            nn.BatchNorm(4, channel_axis=-3),
            nn.Lambda(jax.nn.relu),
            nn.MaxPool2d(2),
            nn.Dropout(0.1),
            nn.Flatten(-3),
            nn.Linear(36, 5, key=k2),
        ]
    )


class _BilinearOfOne(nn.Bilinear):
    """A layer of two inputs, of one."""

    def __call__(self, x):
        return super().__call__(x, x)


def _lora() -> tether.Module:
    return nn.LoRA(nn.Linear(5, 3, key=_key()), 2, alpha=4, key=_key(), b_init=nn.init.normal())


class _SimpleCellOfOne(nn.SimpleCell):
    """A step from zeros; a carry is an input more."""

    def __call__(self, x):
        return super().__call__(self.init_carry(x.shape[:-1]), x)[1]


class _GRUCellOfOne(nn.GRUCell):
    def __call__(self, x):
        return super().__call__(self.init_carry(x.shape[:-1]), x)[1]


class _LSTMCellOfOne(nn.LSTMCell):
    def __call__(self, x):
        return super().__call__(self.init_carry(x.shape[:-1]), x)[1]


def _both_ways() -> tether.Module:
    k1, k2 = jax.random.split(_key())
    return nn.Bidirectional(nn.RNN(nn.SimpleCell(5, 3, key=k1)), nn.RNN(nn.GRUCell(5, 2, key=k2), reverse=True))


LAYERS = [
    Layer("Bilinear", lambda: _BilinearOfOne(5, 5, 3, key=_key()), normal(5), wrong=((6,), (5, 4), ())),
    Layer("LoRA", _lora, normal(5), wrong=((6,), (5, 4), ()), blames="Linear"),
    Layer("Residual", lambda: nn.Residual(nn.Linear(5, 5, key=_key())), normal(5), wrong=((6,), ()), blames="Linear"),
    Layer("PReLU", nn.PReLU, normal(5)),
    Layer("PReLU channels", lambda: nn.PReLU(3, channel_axis=-2), normal(3, 4), wrong=((4,), (2, 4, 4), ())),
    Layer("Linear", lambda: nn.Linear(5, 3, key=_key()), normal(5), wrong=((6,), (5, 4), ())),
    Layer("Linear no bias", lambda: nn.Linear(5, 3, use_bias=False, key=_key()), normal(5), wrong=((2, 6),)),
    Layer("Conv1d", lambda: nn.Conv1d(2, 4, 3, 2, key=_key()), normal(2, 9), wrong=((9,), (3, 9), (2, 2), (6, 9, 2))),
    Layer(
        "Conv2d",
        lambda: nn.Conv2d(2, 4, 3, padding="SAME", key=_key()),
        normal(2, 6, 5),
        wrong=((6, 5), (3, 6, 5), (7, 3, 6, 5), (7, 6, 5, 2), (2,), ()),
    ),
    Layer(
        "Conv2d groups",
        lambda: nn.Conv2d(4, 4, (3, 2), 2, ((1, 0), (0, 2)), (1, 2), 2, use_bias=False, key=_key()),
        normal(4, 6, 5),
        wrong=((2, 6, 5), (4, 1, 5)),
    ),
    Layer(
        "Conv3d",
        lambda: nn.Conv3d(2, 3, 2, key=_key()),
        normal(2, 3, 4, 5),
        wrong=((3, 4, 5), (3, 3, 4, 5), (7, 2, 1, 4, 5)),
    ),
    Layer("BatchNorm", lambda: nn.BatchNorm(4), normal(4), wrong=((4,), (2, 5), (2, 5, 4), ()), any_batch=False),
    Layer(
        "BatchNorm channels from the end",
        lambda: nn.BatchNorm(3, channel_axis=-3, mode="ema"),
        normal(3, 4, 5),
        wrong=((2, 4, 4, 5), (4, 5), (3,)),
    ),
    Layer("LayerNorm", lambda: nn.LayerNorm(4), normal(4), wrong=((5,), (4, 1), ())),
    Layer("LayerNorm two axes", lambda: nn.LayerNorm((3, 4), use_bias=False), normal(3, 4), wrong=((4, 3), (4,))),
    Layer("Dropout", lambda: nn.Dropout(0.4), normal(5)),
    Layer("Dropout channels", lambda: nn.Dropout(0.4, shared_axes=(-2, -1)), normal(3, 4, 4), wrong=((4,), ())),
    Layer("Embedding", lambda: nn.Embedding(7, 4, key=_key()), _ids, floating=False),
    Layer("MaxPool1d", lambda: nn.MaxPool1d(2), normal(2, 7), wrong=((7,), (2, 1))),
    Layer("MaxPool2d", lambda: nn.MaxPool2d(3, 2, 1), normal(2, 6, 7), wrong=((6, 7), (7,), ())),
    Layer("MaxPool3d", lambda: nn.MaxPool3d(2, 1), normal(2, 3, 4, 5), wrong=((3, 4, 5), (2, 1, 4, 5))),
    Layer("AvgPool1d", lambda: nn.AvgPool1d(2, padding="SAME"), normal(2, 7), wrong=((7,), (2, 0), ())),
    Layer("AvgPool2d", lambda: nn.AvgPool2d(3, 2, 1, count_include_pad=False), normal(2, 6, 7), wrong=((6, 7), (7,))),
    Layer("AvgPool3d", lambda: nn.AvgPool3d(2), normal(2, 4, 4, 5), wrong=((4, 4, 5), (2, 4, 4, 1))),
    Layer("Lambda", lambda: nn.Lambda(jnp.tanh), normal(5)),
    Layer("Identity", nn.Identity, normal(5)),
    Layer("Flatten", lambda: nn.Flatten(-2), normal(3, 4), wrong=((4,), ())),
    Layer("MLP", lambda: nn.MLP(5, 2, 4, 2, key=_key()), normal(5), wrong=((6,), ()), blames="Linear"),
    Layer("Sequential", _mixed, normal(1, 6, 6), wrong=((6, 6), (2, 6, 6), (1, 8, 8)), blames="(Conv2d|Linear)"),
    Layer(
        "Conv1d causal",
        lambda: nn.Conv1d(2, 3, 3, padding="CAUSAL", dilation=2, padding_mode="replicate", key=_key()),
        normal(2, 6),
        wrong=((6,), (2, 0)),
    ),
    Layer(
        "Conv2d reflect",
        lambda: nn.Conv2d(2, 3, 3, padding="SAME", padding_mode="reflect", key=_key()),
        normal(2, 4, 5),
        wrong=((2, 1, 5), (3, 4, 5)),
    ),
    Layer(
        "ConvTranspose1d", lambda: nn.ConvTranspose1d(2, 4, 3, 2, key=_key()), normal(2, 5), wrong=((5,), (3, 5), ())
    ),
    Layer(
        "ConvTranspose2d groups",
        lambda: nn.ConvTranspose2d(4, 2, (3, 2), 2, 1, groups=2, output_padding=(0, 1), key=_key()),
        normal(4, 3, 4),
        wrong=((3, 4), (2, 3, 4), (4, 3, 0)),
    ),
    Layer(
        "ConvTranspose3d",
        lambda: nn.ConvTranspose3d(2, 3, 2, padding="SAME", convention="correlation", key=_key()),
        normal(2, 2, 3, 2),
        wrong=((2, 3, 2), (3, 2, 3, 2)),
    ),
    Layer("MaxPool1d ceil", lambda: nn.MaxPool1d(3, 2, ceil_mode=True), normal(2, 6), wrong=((6,), (2, 0))),
    Layer("MaxPool2d dilation", lambda: nn.MaxPool2d(2, 1, 1, 2), normal(2, 6, 7), wrong=((6, 7), (2, 1, 1))),
    Layer("MinPool1d", lambda: nn.MinPool1d(2), normal(2, 7), wrong=((7,), (2, 1))),
    Layer("MinPool2d", lambda: nn.MinPool2d(3, 2, 1), normal(2, 5, 7), wrong=((6, 7), (7,), ())),
    Layer("MinPool3d", lambda: nn.MinPool3d(2, 1, dilation=2), normal(2, 3, 4, 5), wrong=((3, 4, 5), (2, 1, 4, 5))),
    Layer("AvgPool1d ceil", lambda: nn.AvgPool1d(3, 2, ceil_mode=True), normal(2, 6), wrong=((6,), (2, 0))),
    Layer("AdaptiveAvgPool1d", lambda: nn.AdaptiveAvgPool1d(3), normal(2, 7), wrong=((7,), (2, 0), ())),
    Layer("AdaptiveAvgPool2d", lambda: nn.AdaptiveAvgPool2d((2, None)), normal(2, 5, 4), wrong=((5, 4), (2, 0, 4))),
    Layer("AdaptiveAvgPool3d", lambda: nn.AdaptiveAvgPool3d(2), normal(2, 4, 3, 5), wrong=((4, 3, 5),)),
    Layer("AdaptiveMaxPool1d", lambda: nn.AdaptiveMaxPool1d(3), normal(2, 7), wrong=((7,), (2, 0), ())),
    Layer("AdaptiveMaxPool2d", lambda: nn.AdaptiveMaxPool2d((2, None)), normal(2, 5, 4), wrong=((5, 4), (2, 0, 4))),
    Layer("AdaptiveMaxPool3d", lambda: nn.AdaptiveMaxPool3d(2), normal(2, 4, 3, 5), wrong=((4, 3, 5),)),
    Layer("GlobalAvgPool", lambda: nn.GlobalAvgPool(2), normal(3, 4, 5), wrong=((4, 5), (3, 0, 5), ())),
    Layer("GlobalMaxPool", lambda: nn.GlobalMaxPool(2), normal(3, 4, 5), wrong=((4, 5), (3, 0, 5), ())),
    Layer("RMSNorm", lambda: nn.RMSNorm(4), normal(4), wrong=((5,), (4, 1), ())),
    Layer("RMSNorm two axes", lambda: nn.RMSNorm((3, 4), use_bias=True), normal(3, 4), wrong=((4, 3), (4,))),
    Layer(
        "GroupNorm",
        lambda: nn.GroupNorm(2, 4),
        normal(4, 3),
        wrong=((2, 3, 4), (4,), (2, 5, 3), ()),
        any_batch=False,
    ),
    Layer(
        "GroupNorm channels from the end",
        lambda: nn.GroupNorm(2, 4, channel_axis=-3),
        normal(4, 3, 2),
        wrong=((3, 2), (5, 3, 2), (4, 3)),
    ),
    Layer(
        "GroupNorm channels last",
        lambda: nn.GroupNorm(2, 4, channel_axis=-1, space_axes=(-3, -2), affine=False),
        normal(3, 2, 4),
        wrong=((4, 3, 2), (2, 4), (4,), ()),
    ),
    Layer(
        "InstanceNorm",
        lambda: nn.InstanceNorm(4, affine=True),
        normal(4, 3),
        wrong=((2, 3, 4), (4,), (2, 4), (2, 4, 1), ()),
        any_batch=False,
    ),
    Layer(
        "InstanceNorm with running statistics",
        lambda: nn.InstanceNorm(3, affine=True, track_running_stats=True, channel_axis=-3),
        normal(3, 4, 5),
        wrong=((4, 4, 5), (4, 5), (3,)),
    ),
    Layer(
        "SpectralNorm",
        lambda: nn.SpectralNorm(nn.Linear(5, 3, key=_key()), key=_key()),
        normal(5),
        wrong=((6,), ()),
        blames="Linear",
    ),
    Layer(
        "SpectralNorm of a convolution, two iterations",
        lambda: nn.SpectralNorm(nn.Conv2d(2, 4, 3, padding="SAME", key=_key()), n_power_iterations=2, key=_key()),
        normal(2, 6, 5),
        wrong=((6, 5), (3, 6, 5)),
        blames="Conv2d",
    ),
    Layer(
        "WeightNorm",
        lambda: nn.WeightNorm(nn.Linear(5, 3, key=_key())),
        normal(5),
        wrong=((6,), ()),
        blames="Linear",
    ),
    Layer(
        "WeightNorm around SpectralNorm",
        lambda: nn.WeightNorm(nn.SpectralNorm(nn.Linear(5, 3, key=_key()), key=_key()), "layer.weight", axis=None),
        normal(5),
        wrong=((6,),),
        blames="Linear",
    ),
    Layer("Dropout of all", lambda: nn.Dropout(1.0), normal(5)),
    Layer("DropPath", lambda: nn.DropPath(0.4), normal(5, 2), wrong=((),)),
    Layer("DropPath of one example", lambda: nn.DropPath(0.4, example_axes=()), normal(5, 2)),
    Layer("AlphaDropout", lambda: nn.AlphaDropout(0.4), normal(5)),
    Layer("SimpleCell", lambda: _SimpleCellOfOne(5, 3, key=_key()), normal(5), wrong=((6,), (5, 4), ())),
    Layer("GRUCell", lambda: _GRUCellOfOne(5, 3, key=_key()), normal(5), wrong=((6,), (5, 4), ())),
    Layer("LSTMCell", lambda: _LSTMCellOfOne(5, 3, key=_key()), normal(5), wrong=((6,), (5, 4), ())),
    Layer(
        "RNN",
        lambda: nn.RNN(nn.SimpleCell(5, 3, key=_key()), reverse=True),
        normal(4, 5),
        wrong=((6, 4, 6), (5, 6), (5,), ()),
        blames="(RNN|SimpleCell)",
    ),
    Layer("Bidirectional", _both_ways, normal(4, 5), wrong=((6, 4, 6), (5,), ()), blames="(RNN|SimpleCell)"),
    Layer(
        "MultiHeadAttention",
        lambda: nn.MultiHeadAttention(8, 2, dropout=0.1, key=_key()),
        normal(5, 8),
        wrong=((8,), (5, 6), (2, 8, 5), ()),
    ),
    Layer(
        "MultiHeadAttention causal, groups, rotary",
        lambda: nn.MultiHeadAttention(
            8, 4, num_kv_heads=2, causal=True, rotary=nn.RotaryEmbedding(2), use_bias=False, key=_key()
        ),
        normal(5, 8),
        wrong=((3, 4, 7),),
    ),
    Layer("RotaryEmbedding", lambda: nn.RotaryEmbedding(4), normal(5, 4), wrong=((4,), (5, 3), ())),
    Layer(
        "RotaryEmbedding interleaved",
        lambda: nn.RotaryEmbedding(6, layout="interleaved", rotated=4),
        normal(5, 6),
        wrong=((6,), (5, 4)),
    ),
]
