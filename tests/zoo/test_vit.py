# SPDX-License-Identifier: Apache-2.0
"""ViT against its twin in PyTorch, and against the published numbers of parameters."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tether
from tests.zoo import oracle, transformers
from tether.errors import ArgumentError, ShapeError
from tether.interop import torch as interop
from tether.zoo import _vit
from tether.zoo._vit import ViT

CASE = transformers.CASES["vit"]


def test_is_its_twin():
    with jax.enable_x64(True):
        gaps = oracle.differences(transformers.of_tether(CASE), transformers.stored()["vit"])
    assert max(gaps.values()) < transformers.BOUND, {w: gap for w, gap in gaps.items() if gap >= transformers.BOUND}


def test_stored_is_what_the_twin_gives():
    pytest.importorskip("torch")
    from tests.zoo import make_transformer_data

    gaps = oracle.differences(make_transformer_data.of_twin(CASE), transformers.stored()["vit"])
    assert max(gaps.values()) < 1e-12, gaps


@pytest.mark.parametrize(
    ("make", "count"),
    [
        (_vit.vit_b_16, 86_567_656),
        (_vit.vit_b_32, 88_224_232),
        (_vit.vit_l_16, 304_326_632),
        (_vit.vit_l_32, 306_535_400),
        (functools.partial(_vit.vit_h_14, image_size=518), 633_470_440),
    ],
)
def test_has_as_many_parameters_as_published(make, count: int):
    model = tether.eval_shape(make)
    assert sum(variable.value.size for variable in tether.variables(model, tether.Param).values()) == count


def test_names_are_those_of_torchvision():
    model = tether.eval_shape(lambda: _vit.vit_b_16(num_classes=5))
    wanted = interop.load(model, {"nothing": np.ones(1)}, strict=False).missing
    assert len(wanted) == 4 + 12 * 12 + 4
    block = "encoder.layers.encoder_layer_11"
    assert set(wanted) >= {
        *("conv_proj.weight", "class_token", "encoder.pos_embedding", "encoder.ln.bias", "heads.head.weight"),
        *(
            f"{block}.{name}"
            for name in ("ln_1.weight", "self_attention.in_proj_weight", "self_attention.out_proj.bias")
        ),
        *(f"{block}.{name}" for name in ("ln_2.bias", "mlp.0.weight", "mlp.3.bias")),
    }


def test_blocks_are_called_in_order():
    """A dict is in the order of the alphabet: encoder_layer_10 before encoder_layer_2."""
    called = []

    def noted(path, call, x):
        called.append(path)
        return call(x)

    def deep(x):
        return tether.intercept(ViT(**transformers.PATCHED | {"num_layers": 12}), _vit.EncoderBlock, noted)(x)

    tether.eval_shape(deep, jnp.ones((3, 12, 12)))
    assert called == [f"encoder.layers['encoder_layer_{i}']" for i in range(12)]


def test_first_values(key):
    model = tether.jit(lambda key: ViT(8, 4, 1, 2, 64, 96, num_classes=3, key=key))(key)
    np.testing.assert_array_equal(model(jnp.ones((3, 8, 8))), np.zeros(3))
    block, patch = model.encoder.layers["encoder_layer_0"], np.asarray(model.conv_proj.weight)
    assert patch.std() == pytest.approx(1 / np.sqrt(48), rel=0.05)
    assert abs(patch).max() > 3 / np.sqrt(48)  # cut at 2, not at two deviations
    most = lambda weight: float(abs(weight).max())
    assert most(block.self_attention.key_proj.weight) == pytest.approx(np.sqrt(6 / 256), rel=0.02)
    assert most(block.self_attention.out_proj.weight) == pytest.approx(1 / 8, rel=0.02)
    assert most(block.mlp[0].weight) == pytest.approx(np.sqrt(6 / 160), rel=0.02)
    assert 0 < most(block.mlp[3].bias) < 1e-5
    assert float(model.encoder.pos_embedding.std()) == pytest.approx(0.02, rel=0.2)


def test_one_image_or_any_batch(key):
    model = tether.jit(CASE.model(np.float32).eval())
    x = jax.random.normal(key, (2, 2, 3, 12, 12))
    whole = model(x)
    assert whole.shape == (2, 2, 3)
    np.testing.assert_allclose(model(x[1, 0]), whole[1, 0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dropped", ["dropout", "attention_dropout"])
def test_dropout_in_training_alone(dropped: str, key):
    model, x = CASE.model(np.float32, **{dropped: 0.3}), CASE.inputs.astype(np.float32)
    step = tether.jit(lambda key: model(x, key=key))
    one, other = (step(k) for k in jax.random.split(key))
    assert float(abs(one - other).max()) > 1e-2
    with_none = tether.jit(CASE.model(np.float32).eval())(x)
    np.testing.assert_allclose(tether.jit(model.eval())(x), with_none, rtol=1e-5, atol=1e-5)


def test_dtypes():
    model = tether.eval_shape(lambda: ViT(**transformers.PATCHED, dtype=jnp.bfloat16))
    assert {v.value.dtype.name for v in tether.variables(model).values()} == {"bfloat16"}
    small = CASE.model(np.float32).eval()
    y = tether.jit(small)(CASE.inputs.astype(jnp.bfloat16))
    assert y.dtype == jnp.bfloat16
    np.testing.assert_allclose(y.astype(np.float32), tether.jit(small)(CASE.inputs.astype(np.float32)), atol=0.3)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((2, 12, 12, 3), "ViT: x are not images of 3 channels."),
        ((12, 12), "ViT: x are not images of 3 channels."),
        ((2, 3, 12, 8), "ViT: x are not images of 12 x 12."),
        ((3, 24, 24), "ViT: x are not images of 12 x 12."),
    ],
)
def test_wrong_images(shape: tuple[int, ...], message: str):
    with pytest.raises(ShapeError) as caught:
        CASE.model(np.float32)(jnp.ones(shape))
    assert caught.value.what == message
    assert caught.value.expected and caught.value.fixes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"patch_size": 5}, "ViT: patch_size doesn't divide image_size."),
        ({"patch_size": 0}, "ViT: patch_size is not an integer of at least 1."),
        ({"num_layers": 0}, "ViT: num_layers is not an integer of at least 1."),
        ({"num_classes": 0}, "ViT: num_classes is not an integer of at least 1."),
        ({"num_heads": 3}, "MultiHeadAttention: num_heads doesn't divide embed_dim."),
        ({"mlp_dim": 0}, "Linear: out_features is not an integer of at least 1."),
        ({"embed_dim": 0}, "Conv2d: out_channels is not an integer of at least 1."),
    ],
)
def test_wrong_options(options, message: str):
    with pytest.raises(ArgumentError) as caught:
        tether.eval_shape(lambda: ViT(**transformers.PATCHED | options))
    assert caught.value.what == message
