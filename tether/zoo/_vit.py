# SPDX-License-Identifier: Apache-2.0
"""Vision transformers: an image as a row of patches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from tether._core import Param
from tether._modules import Module
from tether.errors import ArgumentError, ShapeError, describe
from tether.nn import Conv2d, Dropout, Lambda, LayerNorm, Linear, Sequential, init
from tether.nn._attention import MultiHeadAttention
from tether.nn._inputs import integer, name_of
from tether.random import keys
from tether.zoo._parts import as_images


def _gelu(x: jax.Array) -> jax.Array:
    """The exact one, as in PyTorch; JAX's default approximates."""
    return jax.nn.gelu(x, approximate=False)


class EncoderBlock(Module):
    """Attention and a feed-forward part, each normalized before and added to its input.

    h = x + dropout(self_attention(ln_1(x))); y = h + mlp(ln_2(h))

    Args:
        embed_dim: Size of the last axis of x and y.
        num_heads: Number of heads.
        mlp_dim: Size of the hidden layer of mlp.
        dropout, attention_dropout: Probabilities to drop an element, and a weight, in training.
        key, dtype: As in ViT.
    Shapes:
        x: float[..., length, embed_dim] -> float[..., length, embed_dim]
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        mlp_dim: int,
        *,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        key: jax.Array | None = None,
        dtype: DTypeLike = jnp.float32,
    ):
        attention_key, out_key, *mlp_keys = keys(key, 4)
        self.ln_1 = LayerNorm(embed_dim, eps=1e-6, dtype=dtype)
        glorot = init.symmetric_uniform(math.sqrt(6 / (4 * embed_dim)))  # of three projections as one matrix
        self.self_attention = MultiHeadAttention(
            embed_dim,
            num_heads,
            dropout=attention_dropout,
            weight_init=glorot,
            bias_init=init.zeros,
            key=attention_key,
            dtype=dtype,
        )
        out_proj = self.self_attention.out_proj
        out_proj.weight = init.symmetric_uniform(1 / math.sqrt(embed_dim))(out_key, out_proj.weight.shape, dtype)
        self.dropout = Dropout(dropout)
        self.ln_2 = LayerNorm(embed_dim, eps=1e-6, dtype=dtype)
        options = {"weight_init": init.glorot_uniform(), "bias_init": init.normal(1e-6), "dtype": dtype}
        first = Linear(embed_dim, mlp_dim, key=mlp_keys[0], **options)
        second = Linear(mlp_dim, embed_dim, key=mlp_keys[1], **options)
        self.mlp = Sequential([first, Lambda(_gelu), Dropout(dropout), second, Dropout(dropout)])

    def __call__(self, x: jax.Array) -> jax.Array:
        h = x + self.dropout(self.self_attention(self.ln_1(x)))
        return h + self.mlp(self.ln_2(h))


class Encoder(Module):
    """Adds to each vector that of its position; then blocks, and a last normalization.

    Args:
        length: Number of positions.
        embed_dim: Size of the last axis of x and y.
        blocks: In the order of the calls.
        dropout, key, dtype: As in ViT.
    Variables:
        pos_embedding: Param, float[1, length, embed_dim].
    Shapes:
        x: float[..., length, embed_dim] -> float[..., length, embed_dim]
    """

    def __init__(
        self,
        length: int,
        embed_dim: int,
        blocks: Sequence[EncoderBlock],
        *,
        dropout: float = 0.0,
        key: jax.Array | None = None,
        dtype: DTypeLike = jnp.float32,
    ):
        self.pos_embedding = Param(init.normal(0.02)(keys(key, 1)[0], (1, length, embed_dim), dtype))
        self.dropout = Dropout(dropout)
        self.layers = {f"encoder_layer_{i}": block for i, block in enumerate(blocks)}
        self.ln = LayerNorm(embed_dim, eps=1e-6, dtype=dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        positions = self.pos_embedding.astype(x.dtype).reshape(x.shape[-2:])
        with jax.numpy_rank_promotion("allow"):
            h = self.dropout(x + positions)
        for i in range(len(self.layers)):  # a dict is in the order of the alphabet, 10 before 2
            h = self.layers[f"encoder_layer_{i}"](h)
        return self.ln(h)


class ViT(Module):
    """Classifies images: patches as vectors, a vector for the class in front, a transformer, a Linear of that vector.

    Names of parts and arithmetic (normalization before, eps 1e-6, exact GELU) are torchvision's, so that its weights
    load without rules. So are the first values; those of the head are zero. ``vit_b_16`` and the like are the known
    sizes.

    Args:
        image_size: Height and width of the images, a multiple of patch_size.
        patch_size: Height and width of a patch.
        num_layers: Number of blocks, at least 1.
        num_heads: Number of heads; divides embed_dim.
        embed_dim: Size of the vectors.
        mlp_dim: Size of the hidden layer of each block.
        num_classes: Size of the output, at least 1.
        in_channels: Of the images.
        dropout, attention_dropout: Probabilities to drop an element, and a weight of an attention, in training.
        key: PRNG key of the first values; None draws from the default stream.
        dtype: Of the parameters.
    Variables:
        class_token: Param, float[1, 1, embed_dim].
    Shapes:
        x: float[..., in_channels, image_size, image_size] -> float[..., num_classes]
    Raises:
        ShapeError: x are not images of in_channels channels and this size.
        ArgumentError: a number out of its range, or sizes that don't divide.
    Example:
        >>> model = tether.zoo.ViT(8, 4, num_layers=1, num_heads=2, embed_dim=8, mlp_dim=16, num_classes=10)
        >>> model(jnp.ones((2, 3, 8, 8))).shape
        (2, 10)
    References:
        Dosovitskiy et al. 2020, arXiv:2010.11929. torchvision.models.vision_transformer for names and numbers.
    """

    def __init__(
        self,
        image_size: int = 224,
        patch_size: int = 16,
        num_layers: int = 12,
        num_heads: int = 12,
        embed_dim: int = 768,
        mlp_dim: int = 3072,
        *,
        num_classes: int = 1000,
        in_channels: int = 3,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        key: jax.Array | None = None,
        dtype: DTypeLike = jnp.float32,
    ):
        name = name_of(self)
        self.image_size = integer(name, "image_size", image_size)
        self.in_channels = integer(name, "in_channels", in_channels)
        patch, count = integer(name, "patch_size", patch_size), integer(name, "num_layers", num_layers)
        length = 1 + _patches(name, self.image_size, patch)
        patch_key, position_key, *block_keys = keys(key, count + 2)
        self.conv_proj = Conv2d(
            self.in_channels,
            embed_dim,
            patch,
            patch,
            weight_init=_truncated(self.in_channels * patch**2),
            bias_init=init.zeros,
            key=patch_key,
            dtype=dtype,
        )
        self.class_token = Param(jnp.zeros((1, 1, embed_dim), dtype))
        named = {"dropout": dropout, "attention_dropout": attention_dropout, "dtype": dtype}
        blocks = [EncoderBlock(embed_dim, num_heads, mlp_dim, key=k, **named) for k in block_keys]
        self.encoder = Encoder(length, embed_dim, blocks, dropout=dropout, key=position_key, dtype=dtype)
        zeros = {"weight_init": init.zeros, "bias_init": init.zeros}
        head = Linear(embed_dim, integer(name, "num_classes", num_classes), dtype=dtype, key=patch_key, **zeros)
        self.heads = Sequential({"head": head})

    def __call__(self, x: ArrayLike) -> jax.Array:
        x = as_images(self, x, self.in_channels)
        if x.shape[-2:] != (self.image_size,) * 2:
            raise ShapeError(
                f"{name_of(self)}: x are not images of {self.image_size} x {self.image_size}.",
                got=describe(x),
                expected=f"[..., {self.in_channels}, {self.image_size}, {self.image_size}]",
                fix=["jax.image.resize(x, shape, 'bilinear')", "image_size as the images have it"],
            )
        h = self.conv_proj(x)
        h = h.reshape((*h.shape[:-2], -1)).swapaxes(-1, -2)  # [..., patches, embed_dim]
        token = jnp.broadcast_to(self.class_token.astype(h.dtype).reshape(-1), (*h.shape[:-2], 1, h.shape[-1]))
        h = self.encoder(jnp.concatenate([token, h], -2))
        return self.heads(h[..., 0, :])


def _patches(name: str, image_size: int, patch_size: int) -> int:
    if image_size % patch_size:
        raise ArgumentError(
            f"{name}: patch_size doesn't divide image_size.",
            got=f"image_size={image_size}, patch_size={patch_size}",
            expected=f"a multiple of {patch_size}",
            fix=f"image_size={max(image_size // patch_size, 1) * patch_size}",
        )
    return (image_size // patch_size) ** 2


def _truncated(fan_in: int) -> init.Initializer:
    """A normal distribution of variance 1 / fan_in, cut at two units, as PyTorch's: not at two deviations."""
    deviation = math.sqrt(1 / fan_in)
    return init.truncated_normal(deviation, lower=-2 / deviation, upper=2 / deviation)


def vit_b_16(**options: Any) -> ViT:
    """The base ViT of patches of 16 x 16; ``options`` are arguments of ViT."""
    return ViT(**options)


def vit_b_32(**options: Any) -> ViT:
    """The base ViT of patches of 32 x 32; ``options`` are arguments of ViT."""
    return ViT(**{"patch_size": 32, **options})


def vit_l_16(**options: Any) -> ViT:
    """The large ViT of patches of 16 x 16; ``options`` are arguments of ViT."""
    return ViT(**{"num_layers": 24, "num_heads": 16, "embed_dim": 1024, "mlp_dim": 4096, **options})


def vit_l_32(**options: Any) -> ViT:
    """The large ViT of patches of 32 x 32; ``options`` are arguments of ViT."""
    return vit_l_16(**{"patch_size": 32, **options})


def vit_h_14(**options: Any) -> ViT:
    """The huge ViT of patches of 14 x 14; ``options`` are arguments of ViT."""
    sizes = {"patch_size": 14, "num_layers": 32, "num_heads": 16, "embed_dim": 1280, "mlp_dim": 5120}
    return ViT(**{**sizes, **options})
