# SPDX-License-Identifier: Apache-2.0
"""A recurrent language model: of characters, or of any other tokens."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from tether._modules import Module
from tether._modules.selection import cell as cell_of
from tether._transforms import scan
from tether.errors import ArgumentError, ShapeError, describe
from tether.nn import Dropout, Embedding, Linear, Sequential
from tether.nn._cells import GRUCell, LSTMCell, SimpleCell
from tether.nn._inputs import as_array, integer, name_of
from tether.nn._rnn import RNN
from tether.random import keys
from tether.zoo._sampling import checked_temperature, next_token

_CELLS = {"lstm": LSTMCell, "gru": GRUCell, "rnn": SimpleCell}


class CharRNN(Module):
    """Gives for each token the logits of the next one.

    An Embedding, ``encoder``; recurrent layers on top of each other, ``rnn``; a Linear, ``decoder``; dropout between
    all of them. The names are those of PyTorch's examples, where ``rnn`` is one LSTM of num_layers.

    Args:
        vocab_size: Number of tokens, at least 1.
        hidden_size: Size of each recurrent layer, at least 1.
        num_layers: At least 1.
        cell: "lstm", "gru" or "rnn".
        embed_size: Size of the embedding; None is hidden_size.
        dropout: Probability, in [0, 1).
        tie_weights: Whether encoder and decoder share their weight; for an embed_size of hidden_size.
        key: PRNG key of the first values; None draws from the default stream.
        dtype: Of the parameters.
    Shapes:
        ids: int[..., time] -> float[..., time, vocab_size]; with return_carry, (carry, logits)
        carry: a tuple with the carry of each layer, as ``init_carry`` gives it, which stands in for None.
    Raises:
        ShapeError: ids without a time axis.
        DtypeError: ids are not integers.
        ArgumentError: an option out of its range; ids outside the vocabulary; another number of carries.
    Example:
        >>> model = tether.zoo.CharRNN(27, 16, key=jax.random.key(0))
        >>> model(jnp.zeros((2, 7), jnp.int32)).shape
        (2, 7, 27)
        >>> model.sample(jnp.asarray([1, 2, 3]), 5, key=jax.random.key(1)).shape
        (5,)
    References:
        Graves 2013, arXiv:1308.0850, section 3. Zaremba et al. 2014, arXiv:1409.2329, for the places of dropout.
        Press and Wolf 2016, arXiv:1608.05859, for tie_weights.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int = 128,
        num_layers: int = 2,
        *,
        cell: str = "lstm",
        embed_size: int | None = None,
        dropout: float = 0.0,
        tie_weights: bool = False,
        key: jax.Array | None = None,
        dtype: DTypeLike = jnp.float32,
    ):
        name = name_of(self)
        make = _cell(name, cell)
        vocab_size, hidden_size = integer(name, "vocab_size", vocab_size), integer(name, "hidden_size", hidden_size)
        embed_size = hidden_size if embed_size is None else integer(name, "embed_size", embed_size)
        encoder_key, decoder_key, rnn_key = keys(key, 3)
        self.encoder = Embedding(vocab_size, embed_size, key=encoder_key, dtype=dtype)
        layer_keys = keys(rnn_key, integer(name, "num_layers", num_layers))
        sizes = [embed_size] + [hidden_size] * (len(layer_keys) - 1)
        self.rnn = Sequential(
            [RNN(make(size, hidden_size, key=k, dtype=dtype)) for size, k in zip(sizes, layer_keys, strict=True)]
        )
        self.dropout = Dropout(dropout)
        self.decoder = Linear(hidden_size, vocab_size, key=decoder_key, dtype=dtype)
        if tie_weights:
            _check_tied(name, embed_size, hidden_size)
            self.decoder.weight = cell_of(self.encoder, "weight")

    def __call__(self, ids: ArrayLike, carry: Sequence[Any] | None = None, *, return_carry: bool = False) -> Any:
        if as_array(self, ids).ndim == 0:
            raise ShapeError(
                f"{name_of(self)}: ids have no time axis.",
                got=describe(ids),
                expected="int[..., time]",
                fix="ids[None]",
            )
        carries = [None] * len(self.rnn) if carry is None else list(carry)
        if len(carries) != len(self.rnn):
            raise ArgumentError(
                f"{name_of(self)}: the carry is not one for each layer.",
                got=describe(carry),
                expected=f"{len(self.rnn)} carries",
                fix="model.init_carry(ids.shape[:-1])",
            )
        h, new = self.dropout(self.encoder(ids)), []
        for layer, before in zip(self.rnn, carries, strict=True):
            after, h = layer(h, before, return_carry=True)
            new.append(after)
            h = self.dropout(h)
        logits = self.decoder(h)
        return (tuple(new), logits) if return_carry else logits

    def init_carry(self, batch_shape: int | Sequence[int] = (), dtype: DTypeLike | None = None) -> tuple[Any, ...]:
        """Gives the carry that a text begins with: that of the cell, for each layer.

        Args:
            batch_shape, dtype: As in ``nn.LSTMCell.init_carry``.
        """
        return tuple(layer.cell.init_carry(batch_shape, dtype) for layer in self.rnn)

    def sample(
        self, prompt: ArrayLike, length: int, *, temperature: float = 1.0, key: jax.Array | None = None
    ) -> jax.Array:
        """Continues a text, token by token, in evaluation.

        Args:
            prompt: int[..., time], at least one token.
            length: Number of tokens to add, at least 1.
            temperature: What logits are divided by, above 0; 0 takes the most probable token.
            key: PRNG key of the draws; None draws it from the current stream.
        Returns:
            The new tokens, int32[..., length].
        Raises:
            ShapeError: an empty prompt.
            ArgumentError: a number out of its range.
        """
        name = name_of(self)
        length, draws = integer(name, "length", length), keys(key, 1)[0]
        temperature = checked_temperature(name, temperature)
        prompt = as_array(self, prompt)
        if prompt.ndim == 0 or prompt.shape[-1] == 0:
            raise ShapeError(
                f"{name}: the prompt has no token to begin with.",
                got=describe(prompt),
                expected="int[..., time], time at least 1",
                fix="a token that stands for the beginning, such as that of a line break",
            )
        model = self.eval()
        carry, logits = model(prompt, return_carry=True)
        start = carry, logits[..., -1, :]
        _, ids = scan(functools.partial(_next, model, temperature), start, jax.random.split(draws, length))
        return jnp.moveaxis(ids, 0, -1)


def _next(model: CharRNN, temperature: float, state: Any, key: jax.Array) -> tuple[Any, jax.Array]:
    """One token: drawn by the logits, then read, which gives the logits after it."""
    carry, logits = state
    ids = next_token(logits, key, temperature, greedy=temperature == 0)
    carry, logits = model(ids[..., None], carry, return_carry=True)
    return (carry, logits[..., 0, :]), ids


def _cell(name: str, cell: str) -> Any:
    if cell not in _CELLS:
        raise ArgumentError(
            f"{name}: no such cell.",
            got=f"cell={describe(cell)}",
            expected=" or ".join(map(repr, _CELLS)),
            fix='cell="lstm"',
        )
    return _CELLS[cell]


def _check_tied(name: str, embed_size: int, hidden_size: int) -> None:
    if embed_size != hidden_size:
        raise ArgumentError(
            f"{name}: weights of two sizes can't be tied.",
            got=f"embed_size={embed_size}, hidden_size={hidden_size}",
            expected="embed_size of hidden_size",
            fix=f"embed_size={hidden_size}",
        )
