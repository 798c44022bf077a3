# SPDX-License-Identifier: Apache-2.0
"""GPT2 against its twin in PyTorch, against the published numbers of parameters, and what it writes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tether
from tests.zoo import oracle, transformers
from tether.errors import ArgumentError, DtypeError, ShapeError
from tether.interop import torch as interop
from tether.zoo import _gpt2
from tether.zoo._gpt2 import GPT2

CASE = transformers.CASES["gpt2"]
IDS = CASE.inputs.astype(np.int32)


@pytest.fixture(scope="module")
def model() -> GPT2:
    return CASE.model(np.float32).eval()


@tether.jit
def run(model, ids, cache=None):
    return model(ids, cache=cache)


def close(got, wanted, tolerance=1e-4):
    np.testing.assert_allclose(np.asarray(got), np.asarray(wanted), rtol=tolerance, atol=tolerance)


def test_is_its_twin():
    with jax.enable_x64(True):
        gaps = oracle.differences(transformers.of_tether(CASE), transformers.stored()["gpt2"])
    assert max(gaps.values()) < transformers.BOUND, {w: gap for w, gap in gaps.items() if gap >= transformers.BOUND}


def test_stored_is_what_the_twin_gives():
    pytest.importorskip("torch")
    from tests.zoo import make_transformer_data

    gaps = oracle.differences(make_transformer_data.of_twin(CASE), transformers.stored()["gpt2"])
    assert max(gaps.values()) < 1e-12, gaps


@pytest.mark.parametrize(
    ("make", "count"),
    [
        (_gpt2.gpt2, 124_439_808),
        (_gpt2.gpt2_medium, 354_823_168),
        (_gpt2.gpt2_large, 774_030_080),
        (_gpt2.gpt2_xl, 1_557_611_200),
    ],
)
def test_has_as_many_parameters_as_published(make, count: int):
    model = tether.eval_shape(make)
    assert sum(variable.value.size for variable in tether.variables(model, tether.Param).values()) == count


def test_published_names_and_layouts():
    """A file as published has masks, maybe a prefix, and the output layer once more."""
    model = tether.eval_shape(lambda: GPT2(**transformers.SMALL))
    shapes = CASE.shapes(model)
    assert shapes["h.1.attn.c_attn.weight"] == (8, 24) and shapes["h.0.mlp.c_fc.weight"] == (8, 32)
    assert set(shapes) > {"wte.weight", "wpe.weight", "h.0.ln_1.weight", "h.1.mlp.c_proj.bias", "ln_f.bias"}
    values = transformers.weights(shapes)
    file = {f"transformer.{name}": value for name, value in values.items()}
    file |= {
        f"transformer.h.{i}.attn.{name}": np.ones((1, 1, 12, 12)) for i in (0, 1) for name in ("bias", "masked_bias")
    }
    report = interop.load(model, file | {"lm_head.weight": values["wte.weight"]}, **GPT2.published)
    assert not report.missing and not report.unexpected
    close(model.h[1].attn.c_attn.weight, values["h.1.attn.c_attn.weight"].T, 1e-6)
    close(model.h[0].attn.c_attn.bias, values["h.0.attn.c_attn.bias"], 1e-6)


def test_first_values(key):
    model = tether.jit(lambda key: GPT2(50, 20, 32, 2, 4, key=key))(key)
    assert float(model.wte.weight.std()) == pytest.approx(0.02, rel=0.1)
    assert float(model.h[1].mlp.c_fc.weight.std()) == pytest.approx(0.02, rel=0.1)
    assert float(model.h[1].mlp.c_proj.weight.std()) == pytest.approx(0.01, rel=0.1)  # 0.02 / sqrt(2 * 2)
    assert float(abs(model.h[0].attn.c_attn.bias).max()) == 0
    assert float(abs(model.h[0].attn.c_attn.weight - model.h[1].attn.c_attn.weight).max()) > 0.01


def test_a_token_sees_nothing_behind_it(model):
    other = IDS.copy()
    other[:, 4:] = (other[:, 4:] + 1) % 13
    close(run(model, other)[:, :4], run(model, IDS)[:, :4], 1e-6)
    assert float(abs(run(model, other) - run(model, IDS))[:, 4:].max()) > 0.1


@pytest.mark.parametrize("batch", [(), (1, 3)], ids=str)
def test_any_batch_axes(model, batch: tuple[int, ...]):
    ids = IDS[0] if batch == () else IDS.reshape(1, 3, 7)
    close(run(model, ids), run(model, IDS)[0] if batch == () else run(model, IDS)[None])


def test_dropout_in_training_alone(key):
    model = CASE.model(np.float32, dropout=0.3)
    step = tether.jit(lambda key: model(IDS, key=key))
    twice = [step(k) for k in jax.random.split(key)]
    assert float(abs(twice[0] - twice[1]).max()) > 0.1
    close(run(model.eval(), IDS), run(CASE.model(np.float32).eval(), IDS))


class TestCache:
    def test_pieces_give_what_the_whole_gives(self, model):
        cache = model.init_cache(3, 7)
        pieces = [run(model, part, cache) for part in np.split(IDS, [3, 4, 5, 6], axis=1)]
        close(np.concatenate(pieces, 1), run(model, IDS))
        assert cache.lengths.tolist() == [7, 7, 7]
        cache.reset(np.asarray([True, False, True]))
        assert cache.lengths.tolist() == [0, 7, 0]
        cache.reset()
        close(run(model, IDS[:, :3], cache), run(model, IDS)[:, :3])

    def test_past_the_end(self, model):
        cache = model.init_cache(3, 5)
        assert not np.isnan(run(model, IDS[:, :5], cache)).any()
        assert np.isnan(run(model, IDS[:, 5:6], cache)).all()
        with pytest.raises(ShapeError, match="KVCache: there is no room for the tokens") as caught:
            model(IDS[:, 6:], cache=cache)
        assert caught.value.at == "h[0].attn  (Attention)"

    @pytest.mark.parametrize("cache", [[], 3], ids=repr)
    def test_that_is_none(self, model, cache):
        with pytest.raises(ArgumentError, match="GPT2: cache is not one of this model"):
            model(IDS, cache=cache)

    def test_of_a_deeper_model(self, model):
        cache = GPT2(**transformers.SMALL | {"num_layers": 3}).init_cache(3, 7)
        with pytest.raises(ArgumentError) as caught:
            model(IDS, cache=cache)
        assert (caught.value.got, caught.value.expected) == ("3 layers", "a cache of 2 layers")


class TestGenerate:
    def test_likeliest_tokens(self, model):
        """Those of the twin are compared in test_is_its_twin; here, that they aren't all the same."""
        tokens = np.asarray(model.generate(IDS, transformers.NEW_TOKENS))
        assert tokens.dtype == np.int32
        np.testing.assert_array_equal(tokens.ravel(), transformers.stored()["gpt2"]["tokens"])
        assert len(set(tokens.ravel().tolist())) > 2

    def test_one_program(self, model):
        before = _gpt2._generate.traces
        tokens = [model.generate(IDS[:2, :2], 3, temperature=t, key=jax.random.key(0)) for t in (0.5, 0.6, 0.5)]
        assert _gpt2._generate.traces == before + 1
        np.testing.assert_array_equal(tokens[0], tokens[2])

    def test_one_text_and_one_token(self, model):
        whole = model.generate(IDS, 4)
        np.testing.assert_array_equal(model.generate(IDS[1], 4), whole[1])
        np.testing.assert_array_equal(model.generate(IDS, 1), whole[:, :1])

    def test_prompts_of_different_lengths(self, model):
        lengths = np.asarray([3, 7])
        together = model.generate(IDS[:2], 4, lengths=lengths)
        for row, length in enumerate(lengths):
            np.testing.assert_array_equal(together[row], model.generate(IDS[row, :length], 4))

    def test_draws_follow_the_distribution(self, model):
        """The first drawn token of 4,000 equal prompts, beside softmax(logits / temperature) of the top five."""
        logits = np.asarray(run(model, IDS[:1]), np.float64)[0, -1] / 2
        p = np.where(logits >= np.sort(logits)[-5], np.exp(logits), 0)
        drawn = model.generate(np.repeat(IDS[:1], 4000, 0), 1, temperature=2.0, top_k=5, key=jax.random.key(3))
        got = np.bincount(np.asarray(drawn)[:, 0], minlength=13) / 4000
        np.testing.assert_allclose(got, p / p.sum(), atol=0.03)
        assert (got > 0).sum() == 5

    def test_top_one_is_the_likeliest(self, model):
        np.testing.assert_array_equal(model.generate(IDS, 3, temperature=1.0, top_k=1), model.generate(IDS, 3))
        everything = [model.generate(IDS, 3, temperature=9.0, top_k=k, key=jax.random.key(0)) for k in (None, 13, 99)]
        np.testing.assert_array_equal(everything[0], everything[1])
        np.testing.assert_array_equal(everything[0], everything[2])

    def test_keys(self, model):
        draws = [model.generate(IDS, 5, temperature=9.0) for _ in range(2)]
        assert (np.asarray(draws[0]) != np.asarray(draws[1])).any()
        uses = tether.uses(lambda: model.generate(IDS, 2))()
        assert not uses.writes  # the likeliest token needs no draw, and the cache stays inside

    def test_trained_dropout_stays_out(self):
        dropping = CASE.model(np.float32, dropout=0.5)
        np.testing.assert_array_equal(
            dropping.generate(IDS, transformers.NEW_TOKENS).ravel(), transformers.stored()["gpt2"]["tokens"]
        )

    @pytest.mark.parametrize(
        ("arguments", "error", "message"),
        [
            ({"count": 0}, ArgumentError, "GPT2: count is not an integer of at least 1."),
            ({"count": 6}, ShapeError, "GPT2: the text would be longer than the model has positions."),
            ({"top_k": 0}, ArgumentError, "GPT2: top_k is not an integer of at least 1."),
            ({"temperature": -1.0}, ArgumentError, "GPT2: temperature is not a number of at least 0."),
            ({"temperature": True}, ArgumentError, "GPT2: temperature is not a number of at least 0."),
            ({"lengths": np.ones(2, np.int32)}, ShapeError, "GPT2: lengths are not one for each prompt."),
            ({"lengths": np.ones(3)}, DtypeError, "GPT2: lengths are not integers."),
            ({"ids": IDS.astype(np.float32)}, DtypeError, "GPT2: ids are not integers."),
        ],
    )
    def test_wrong_arguments(self, model, arguments, error, message: str):
        with pytest.raises(error) as caught:
            model.generate(**{"ids": IDS, "count": 2} | arguments)
        assert caught.value.what == message
        assert caught.value.got and caught.value.expected and caught.value.fixes

    def test_too_long_says_what_to_do(self, model):
        with pytest.raises(ShapeError) as caught:
            model.generate(IDS, 6)
        assert str(caught.value).splitlines()[1:] == [
            "  got:      a prompt of 7 tokens, 6 more",
            "  expected: at most 12 in all",
            "  fix:      ids[..., -6:], or fewer new tokens",
        ]


@pytest.mark.parametrize("shape", [(), (2, 13), (2, 0)], ids=str)
def test_wrong_texts(model, shape: tuple[int, ...]):
    with pytest.raises(ShapeError) as caught:
        model(np.zeros(shape, np.int32))
    assert caught.value.what == "GPT2: ids are no texts of 1 to 12 tokens."


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_heads": 3}, "GPT2: num_heads doesn't divide embed_dim."),
        ({"num_heads": 0}, "GPT2: num_heads is not an integer of at least 1."),
        ({"num_layers": 0}, "GPT2: num_layers is not an integer of at least 1."),
        ({"num_positions": 2.5}, "GPT2: num_positions is not an integer of at least 1."),
        ({"vocab_size": 0}, "Embedding: num_embeddings is not an integer of at least 1."),
    ],
)
def test_wrong_options(options, message: str):
    with pytest.raises(ArgumentError) as caught:
        GPT2(**transformers.SMALL | options)
    assert caught.value.what == message


def test_compute_dtype(model):
    lowered = tether.view(model, compute_dtype=jnp.bfloat16)
    logits = run(lowered, IDS, lowered.init_cache(3, 7))
    assert logits.dtype == jnp.bfloat16
    close(logits.astype(jnp.float32), run(model, IDS), 0.3)
