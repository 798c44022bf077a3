# SPDX-License-Identifier: Apache-2.0
"""The transformers of the zoo in PyTorch's own layers, under the names of their published weights; they need torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


class Conv1D(nn.Module):
    """A linear map whose weight lies as [in, out], as GPT-2's were published."""

    def __init__(self, before: int, after: int):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.zeros(before, after)), nn.Parameter(torch.zeros(after))

    def forward(self, x: Any) -> Any:
        return x @ self.weight + self.bias


class Attention(nn.Module):
    def __init__(self, size: int, heads: int, positions: int):
        super().__init__()
        self.heads = heads
        self.c_attn, self.c_proj = Conv1D(size, 3 * size), Conv1D(size, size)
        self.register_buffer("bias", torch.ones(positions, positions).tril().bool()[None, None])

    def forward(self, x: Any) -> Any:
        q, k, v = (h.unflatten(-1, (self.heads, -1)).transpose(1, 2) for h in self.c_attn(x).chunk(3, -1))
        logits = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        length = x.shape[1]
        weights = logits.masked_fill(~self.bias[..., :length, :length], -torch.inf).softmax(-1)
        return self.c_proj((weights @ v).transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    def __init__(self, size: int):
        super().__init__()
        self.c_fc, self.c_proj = Conv1D(size, 4 * size), Conv1D(4 * size, size)

    def forward(self, x: Any) -> Any:
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, size: int, heads: int, positions: int):
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(size), Attention(size, heads, positions)
        self.ln_2, self.mlp = nn.LayerNorm(size), FeedForward(size)

    def forward(self, x: Any) -> Any:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT2(nn.Module):
    def __init__(self, vocab_size: int, num_positions: int, embed_dim: int, num_layers: int, num_heads: int):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab_size, embed_dim), nn.Embedding(num_positions, embed_dim)
        self.h = nn.ModuleList(Block(embed_dim, num_heads, num_positions) for _ in range(num_layers))
        self.ln_f = nn.LayerNorm(embed_dim)

    def forward(self, ids: Any) -> Any:
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[-1]))
        for block in self.h:
            x = block(x)
        return self.ln_f(x) @ self.wte.weight.T

    def generate(self, ids: Any, count: int) -> Any:
        """The likeliest token each time, from the whole text each time."""
        start = ids.shape[-1]
        for _ in range(count):
            ids = torch.cat([ids, self(ids)[:, -1:].argmax(-1)], -1)
        return ids[:, start:]


class EncoderBlock(nn.Module):
    def __init__(self, size: int, heads: int, hidden: int):
        super().__init__()
        self.ln_1 = nn.LayerNorm(size, eps=1e-6)
        self.self_attention = nn.MultiheadAttention(size, heads, batch_first=True)
        self.ln_2 = nn.LayerNorm(size, eps=1e-6)
        self.mlp = nn.Sequential(
            nn.Linear(size, hidden), nn.GELU(), nn.Dropout(0.0), nn.Linear(hidden, size), nn.Dropout(0.0)
        )

    def forward(self, x: Any) -> Any:
        h = self.ln_1(x)
        x = x + self.self_attention(h, h, h, need_weights=False)[0]
        return x + self.mlp(self.ln_2(x))


class Encoder(nn.Module):
    def __init__(self, length: int, layers: int, size: int, heads: int, hidden: int):
        super().__init__()
        self.pos_embedding = nn.Parameter(torch.zeros(1, length, size))
        self.layers = nn.Sequential()
        for i in range(layers):
            self.layers.add_module(f"encoder_layer_{i}", EncoderBlock(size, heads, hidden))
        self.ln = nn.LayerNorm(size, eps=1e-6)

    def forward(self, x: Any) -> Any:
        return self.ln(self.layers(x + self.pos_embedding))


class ViT(nn.Module):
    def __init__(
        self,
        image_size: int,
        patch_size: int,
        num_layers: int,
        num_heads: int,
        embed_dim: int,
        mlp_dim: int,
        num_classes: int,
    ):
        super().__init__()
        self.conv_proj = nn.Conv2d(3, embed_dim, patch_size, patch_size)
        self.class_token = nn.Parameter(torch.zeros(1, 1, embed_dim))
        self.encoder = Encoder((image_size // patch_size) ** 2 + 1, num_layers, embed_dim, num_heads, mlp_dim)
        self.heads = nn.Sequential()
        self.heads.add_module("head", nn.Linear(embed_dim, num_classes))

    def forward(self, x: Any) -> Any:
        x = self.conv_proj(x).flatten(2).transpose(1, 2)
        x = self.encoder(torch.cat([self.class_token.expand(len(x), -1, -1), x], 1))
        return self.heads(x[:, 0])
