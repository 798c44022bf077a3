# SPDX-License-Identifier: Apache-2.0
"""ResNet against its twin in PyTorch, and against the published numbers of parameters."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tether
from tests.zoo import oracle
from tether import errors, zoo
from tether.interop import torch as interop


@pytest.mark.parametrize("name", ["basic", "bottleneck"])
def test_is_its_twin(name: str):
    with jax.enable_x64(True):
        gaps = oracle.differences(oracle.of_tether(oracle.CASES[name]), oracle.stored()[name])
    assert max(gaps.values()) < oracle.BOUND, {what: gap for what, gap in gaps.items() if gap >= oracle.BOUND}


@pytest.mark.parametrize(
    ("make", "count"),
    [
        (zoo.resnet18, 11_689_512),
        (zoo.resnet34, 21_797_672),
        (zoo.resnet50, 25_557_032),
        (zoo.resnet101, 44_549_160),
        (zoo.resnet152, 60_192_808),
        (zoo.wide_resnet50_2, 68_883_240),
        (zoo.wide_resnet101_2, 126_886_696),
    ],
)
def test_has_as_many_parameters_as_published(make, count: int):
    model = tether.eval_shape(make)
    assert sum(variable.value.size for variable in tether.variables(model, tether.Param).values()) == count


def test_names_are_those_of_torchvision():
    model = tether.eval_shape(lambda: zoo.resnet50(num_classes=5))
    wanted = interop.load(model, {"nothing": np.ones(1)}, strict=False).missing
    assert len(wanted) == 5 * 53 + 2  # a convolution and four tensors of its BatchNorm, 53 times, and fc
    assert wanted[:6] == (
        "conv1.weight",
        *(f"bn1.{name}" for name in ("weight", "bias", "running_mean", "running_var")),
        "layer1.0.conv1.weight",
    )
    others = {"layer1.0.downsample.0.weight", "layer4.0.downsample.1.running_var", "layer3.5.bn3.bias", "fc.bias"}
    assert others < set(wanted)
    assert not any("layer1.1.downsample" in name for name in wanted)


@pytest.mark.parametrize(("block", "last"), [("basic", "bn2"), ("bottleneck", "bn3")])
def test_zero_init_residual_zeroes_the_last_weight_of_each_block(block: str, last: str, key):
    def weights(key):  # not the whole model: what nobody wants of it is not computed
        model = zoo.ResNet((2, 1, 1, 1), block, num_classes=3, width=4, zero_init_residual=True, key=key)
        cells = tether.variables(model, tether.Param)
        return {path: v.value.sum() for path, v in cells.items() if "bn" in path and path.endswith("weight")}

    zero = {path for path, total in tether.jit(weights)(key).items() if total == 0}
    assert zero == {f"layer{i}[{j}].{last}.weight" for i, j in ((1, 0), (1, 1), (2, 0), (3, 0), (4, 0))}


def test_first_values_are_those_of_he(key):
    weight = np.asarray(zoo.BasicBlock(64, 128, key=key).conv1.weight)
    assert weight.std() == pytest.approx(np.sqrt(2 / (128 * 9)), rel=0.02) and abs(weight.mean()) < 2e-4


def test_one_image_or_any_batch_in_evaluation(key):
    model = tether.jit(oracle.CASES["basic"].model(np.float32).eval())
    x = jax.random.normal(key, (2, 2, 3, 33, 32))
    whole = model(x)
    assert whole.shape == (2, 2, 3)
    np.testing.assert_allclose(model(x[1, 0]), whole[1, 0], rtol=1e-4, atol=1e-5)


def test_dtype_is_that_of_the_parameters():
    model = tether.eval_shape(lambda: zoo.ResNet(block="bottleneck", dtype=jnp.bfloat16))
    assert {v.value.dtype.name for v in tether.variables(model, tether.Param).values()} == {"bfloat16"}
    assert {v.value.dtype.name for v in tether.variables(model, tether.State).values()} == {"float32"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"depths": (2, 2)}, "ResNet: depths are not four numbers."),
        ({"depths": (2, 2, 0, 2)}, "ResNet: depths is not an integer of at least 1."),
        ({"block": "bottle"}, "ResNet: no such block."),
        ({"width": 0}, "ResNet: width is not an integer of at least 1."),
        ({"num_classes": 0, "width": 2}, "ResNet: num_classes is not an integer of at least 1."),
        ({"groups": 2}, "BasicBlock: this block has neither groups nor a width of its own."),
        ({"groups": 2, "base_width": 8, "block": "bottleneck", "width": 2}, "Bottleneck: base_width is too small"),
    ],
)
def test_wrong_option(options, message):
    with pytest.raises(errors.ArgumentError) as error:
        tether.eval_shape(lambda: zoo.ResNet(**options))
    assert str(error.value).startswith(message), str(error.value)


@pytest.mark.parametrize("shape", [(2, 32, 32, 3), (32, 32), (2, 1, 32, 32)])
def test_wrong_images(shape):
    model = oracle.CASES["basic"].model(np.float32)
    with pytest.raises(errors.ShapeError) as error:
        model(jnp.ones(shape))
    assert str(error.value).startswith("ResNet: x are not images of 3 channels.")
