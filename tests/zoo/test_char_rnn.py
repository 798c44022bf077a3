# SPDX-License-Identifier: Apache-2.0
"""CharRNN against its twin in PyTorch, and its sampling against a loop by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tether
from tests.zoo import oracle
from tether import errors, zoo
from tether.interop import torch as interop

IDS = jnp.asarray([[1, 2, 3, 0], [4, 5, 6, 6]])


@pytest.fixture
def model() -> zoo.CharRNN:
    return oracle.CASES["LSTM"].model(np.float32)


@pytest.mark.parametrize("name", ["LSTM", "GRU"])
def test_is_its_twin(name: str):
    with jax.enable_x64(True):
        gaps = oracle.differences(oracle.of_tether(oracle.CASES[name]), oracle.stored()[name])
    assert max(gaps.values()) < oracle.BOUND, gaps


def test_names_are_those_of_pytorchs_example(model):
    parts = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    of_rnn = [f"rnn.{part}_l{i}" for i in (0, 1) for part in parts]
    assert list(interop.state_dict(model)) == ["encoder.weight", *of_rnn, "decoder.weight", "decoder.bias"]


def test_tied_weights_are_one(key):
    model = tether.eval_shape(lambda: zoo.CharRNN(7, 4, tie_weights=True, key=key))
    assert tether.cell(model, "encoder.weight") is tether.cell(model, "decoder.weight")
    assert list(tether.variables(model)).count("encoder.weight") == 1


def test_in_parts_with_the_carry_between(model):
    whole = model(IDS)
    carry, first = model(IDS[:, :3], return_carry=True)
    np.testing.assert_allclose(jnp.concatenate([first, model(IDS[:, 3:], carry)], 1), whole, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(model(IDS, model.init_carry(2)), whole, rtol=1e-6)


def test_dropout_in_training_alone(key):
    model = zoo.CharRNN(7, 4, dropout=0.5, key=key)
    assert (model(IDS) != model(IDS)).any()
    np.testing.assert_array_equal(model.eval()(IDS), model(IDS, training=False))


class TestSample:
    def test_is_a_loop(self, model, key):
        ids, texts = model.sample(IDS, 5, temperature=0.7, key=key), IDS
        for k in jax.random.split(key, 5):
            logits = model.eval()(texts)[:, -1]
            texts = jnp.concatenate([texts, jax.random.categorical(k, logits / 0.7)[:, None].astype(IDS.dtype)], 1)
        np.testing.assert_array_equal(ids, texts[:, 4:])
        assert ids.dtype == jnp.int32

    def test_the_most_probable(self, model):
        ids, text = model.sample(IDS[0], 4, temperature=0), IDS[0]
        for _ in range(4):
            text = jnp.append(text, model.eval()(text)[-1].argmax().astype(text.dtype))
        np.testing.assert_array_equal(ids, text[4:])

    def test_under_jit(self, model, key):
        sample = tether.jit(lambda model, ids, key: model.sample(ids, 3, key=key))
        np.testing.assert_array_equal(sample(model, IDS, key), model.sample(IDS, 3, key=key))

    def test_draws_from_the_stream(self, model):
        assert (model.sample(IDS, 16) != model.sample(IDS, 16)).any()

    @pytest.mark.parametrize(
        ("args", "options", "message"),
        [
            ((IDS, 0), {}, "CharRNN: length is not an integer of at least 1."),
            ((IDS, 2), {"temperature": -1.0}, "CharRNN: temperature is not a number of at least 0."),
            ((IDS[:, :0], 2), {}, "CharRNN: the prompt has no token to begin with."),
            ((IDS[0, 0], 2), {}, "CharRNN: the prompt has no token to begin with."),
        ],
    )
    def test_wrong_arguments(self, model, args, options, message):
        with pytest.raises(errors.TetherError) as error:
            model.sample(*args, **options)
        assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cell": "tcn"}, "CharRNN: no such cell."),
        ({"num_layers": 0}, "CharRNN: num_layers is not an integer of at least 1."),
        ({"vocab_size": 0}, "CharRNN: vocab_size is not an integer of at least 1."),
        ({"tie_weights": True, "embed_size": 3}, "CharRNN: weights of two sizes can't be tied."),
    ],
)
def test_wrong_option(options, message):
    with pytest.raises(errors.ArgumentError) as error:
        tether.eval_shape(lambda: zoo.CharRNN(**{"vocab_size": 7, "hidden_size": 4, **options}))
    assert str(error.value).startswith(message)


def test_wrong_input(model):
    with pytest.raises(errors.ShapeError) as error:
        model(IDS[0, 0])
    assert str(error.value).startswith("CharRNN: ids have no time axis.")
    with pytest.raises(errors.ArgumentError) as error:
        model(IDS, model.init_carry(2)[:1])
    assert str(error.value) == (
        "CharRNN: the carry is not one for each layer.\n"
        "  at:       the module itself  (CharRNN)\n"
        "  got:      tuple of 1\n"
        "  expected: 2 carries\n"
        "  fix:      model.init_carry(ids.shape[:-1])"
    )
