# SPDX-License-Identifier: Apache-2.0
"""ResNetV2: published numbers of parameters, a float64 network in NumPy, and weights that come from Keras."""

from __future__ import annotations

import functools
import math
import sys
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

import tether.compat.objax as objax
from tests.compat.objax.zoo import _numpy
from tether._transforms import eval_shape
from tether.compat.objax.zoo import resnet_v2

NAMES = ["ResNet18", "ResNet34", "ResNet50", "ResNet101", "ResNet152", "ResNet200"]
EPS = 1e-6


def sizes(make):
    """The sizes of all variables, and of those that are trained, by name."""
    kept = eval_shape(lambda: [{n: v.value for n, v in vc.items()} for vc in both(make().vars())])
    return [{name: math.prod(value.shape) for name, value in values.items()} for values in kept]


def both(vc):
    return vc, vc.subset(objax.TrainVar)


class TestSizes:
    @pytest.mark.parametrize(("name", "version_1"), [("ResNet18", 11_689_512), ("ResNet34", 21_797_672)])
    def test_those_of_torchvision(self, name, version_1):
        """Less scale and bias of the three norms that version 1 has after projections, of 128, 256 and 512 channels."""
        trained = sum(sizes(lambda: getattr(resnet_v2, name)(3, 1000))[1].values())
        assert trained == version_1 - 2 * (128 + 256 + 512)

    @pytest.mark.parametrize(
        ("name", "total"), [("ResNet50", 25_613_800), ("ResNet101", 44_675_560), ("ResNet152", 60_380_648)]
    )
    def test_those_of_keras(self, name, total):
        """The table of keras.applications, less the biases that Keras has after some convolutions."""
        groups = {"ResNet50": (3, 4, 6, 3), "ResNet101": (3, 4, 23, 3), "ResNet152": (3, 8, 36, 3)}[name]
        biases = 64 + sum((blocks + 1) * 256 * 2**group for group, blocks in enumerate(groups))
        assert sum(sizes(lambda: getattr(resnet_v2, name)(3, 1000))[0].values()) + biases == total

    @pytest.mark.parametrize("name", NAMES)
    @pytest.mark.parametrize("training", [False, True])
    def test_shapes(self, name, training):
        """From 64 pixels to 2, in both modes."""
        x = jnp.zeros((2, 3, 64, 64))
        network = lambda: getattr(resnet_v2, name)(in_channels=3, num_classes=10)
        assert eval_shape(lambda: network()(x, training=training)).shape == (2, 10)
        assert eval_shape(lambda: network()[:7](x, training=training)).shape[2:] == (2, 2)

    def test_names(self):
        names: list[str] = []
        eval_shape(lambda: names.extend(resnet_v2.ResNet50(3, 10).vars().keys()))
        assert names[:3] == [
            "(ResNet50)[0](Conv2D).w",
            "(ResNet50)[3](ResNetV2BlockGroup)[0](ResNetV2Block).proj_conv(Conv2D).w",
            "(ResNet50)[3](ResNetV2BlockGroup)[0](ResNetV2Block).norm_0(BatchNorm2D).running_mean",
        ]
        assert names[-2:] == ["(ResNet50)[10](Linear).b", "(ResNet50)[10](Linear).w"]
        assert len(names) == len(set(names)) == 1 + 16 * (3 * 4 + 3) + 4 + 4 + 2


def by_hand(x, values, groups, bottleneck, training=False, eps=EPS):
    """The network in float64. ``groups``: for each block its (stride, whether it has a projection)."""
    root = next(iter(values)).partition("[")[0]

    def at(prefix):
        return _numpy.part(values, root + prefix)

    def biased(prefix):
        found = at(prefix)
        return found["w"], found.get("b", 0.0)

    def norm(h, prefix):
        return np.maximum(_numpy.batch_norm(h, at(prefix), eps, training), 0)

    w, b = biased("[0](Conv2D).")
    h = _numpy.max_pool(np.pad(_numpy.conv(x, w, 2, 3, b), [(0, 0), (0, 0), (1, 1), (1, 1)]), 3, 2)
    for group, blocks in enumerate(groups):
        for number, (stride, projected) in enumerate(blocks):
            block = f"[{3 + group}](ResNetV2BlockGroup)[{number}](ResNetV2Block)."
            shortcut = h[:, :, ::stride, ::stride]
            kinds = [(1, 1, 0), (3, stride, 1), (1, 1, 0)] if bottleneck else [(3, 1, 1), (3, stride, 1)]
            for place, (size, step, pad) in enumerate(kinds):
                h = norm(h, f"{block}norm_{place}(BatchNorm2D).")
                if place == 0 and projected:
                    w, b = biased(f"{block}proj_conv(Conv2D).")
                    shortcut = _numpy.conv(h, w, stride, 0, b)
                w, b = biased(f"{block}conv_{place}(Conv2D).")
                assert w.shape[0] == size
                h = _numpy.conv(h, w, step, pad, b)
            h = h + shortcut
    last = 3 + len(groups)
    h = norm(h, f"[{last}](BatchNorm2D).").mean((2, 3))
    head = at(f"[{last + 3}](Linear).")
    return h @ head["w"] + head["b"]


class TestValues:
    @pytest.mark.parametrize("bottleneck", [False, True])
    def test_against_numpy(self, bottleneck):
        network = resnet_v2.ResNetV2(
            3,
            5,
            blocks_per_group=(2, 1, 2),
            bottleneck=bottleneck,
            channels_per_group=(64, 8, 8),
            group_strides=(2, 1, 2),
            group_use_projection=(False, True, True),
        )
        values = _numpy.weights(network)
        for name, variable in network.vars().items():
            variable.assign(jnp.asarray(values[name]))
        x = np.random.default_rng(1).normal(size=(3, 3, 21, 21)).astype("f")
        groups = [[(1, False), (2, False)], [(1, True)], [(1, True), (2, False)]]
        for training in (False, True):
            expected = by_hand(x.astype(np.float64), values, groups, bottleneck, training)
            found = objax.Jit(functools.partial(network, training=training), network.vars())(x)
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())

    def test_strides_may_be_pairs(self):
        block = resnet_v2.ResNetV2Block(8, 8, (1, 2), use_projection=False, bottleneck=False)
        x = jnp.arange(8.0 * 6 * 6).reshape(1, 8, 6, 6)
        block.conv_1.w.assign(0 * block.conv_1.w.value)
        np.testing.assert_array_equal(block(x, training=False), x[:, :, :, ::2])

    def test_the_first_weights(self):
        """Normal, of variance 2 / (k k nout)."""
        conv = objax.nn.Conv2D(64, 32, 3, **resnet_v2.conv_args(3, 32))
        np.testing.assert_allclose(float(conv.w.value.std()), math.sqrt(2 / (9 * 32)), rtol=0.02)
        assert conv.b is None and conv.padding == "VALID"

    def test_groups_of_different_number(self):
        with pytest.raises(AssertionError) as caught:
            resnet_v2.ResNetV2(3, 10, blocks_per_group=(1, 1), channels_per_group=(8, 8), group_strides=(1, 2, 2))
        assert str(caught.value) == (
            "ResNetV2: group_strides has not one entry for each group.\n"
            "  got:      group_strides=(1, 2, 2), blocks_per_group=(1, 1)\n"
            "  expected: 2 entries"
        )


class Numbers:
    """A variable of Keras."""

    def __init__(self, value):
        self.value = value

    def numpy(self):
        return self.value


class Keras:
    """A model as Keras has it: layers with names, in the order in which Keras makes them."""

    def __init__(self, num_blocks, widths, generator, top=True):
        self.layers, self.draw = [], generator
        self.conv("conv1_conv", 7, 3, 64, bias=True)
        nin = 64
        for group, (blocks, width) in enumerate(zip(num_blocks, widths, strict=True), 2):
            for number in range(1, blocks + 1):
                name = f"conv{group}_block{number}"
                self.norm(f"{name}_preact_bn", nin)
                if number == 1:
                    self.conv(f"{name}_0_conv", 1, nin, width, bias=True)
                self.conv(f"{name}_1_conv", 1, nin, width // 4)
                self.norm(f"{name}_1_bn", width // 4)
                self.conv(f"{name}_2_conv", 3, width // 4, width // 4)
                self.norm(f"{name}_2_bn", width // 4)
                self.conv(f"{name}_3_conv", 1, width // 4, width, bias=True)
                nin = width
        self.norm("post_bn", nin)
        if top:
            self.add("predictions", kernel=self.normal(nin, 5), bias=self.normal(5))

    def normal(self, *shape):
        return (self.draw.normal(size=shape) * 0.4).astype(np.float32)

    def add(self, name, **variables):
        numbers = {key: None if value is None else Numbers(value) for key, value in variables.items()}
        self.layers.append(SimpleNamespace(name=name, **numbers))

    def conv(self, name, k, nin, nout, bias=False):
        self.add(name, kernel=self.normal(k, k, nin, nout), bias=self.normal(nout) if bias else None)

    def norm(self, name, n):
        gamma, beta, mean, var = self.normal(4, n)
        self.add(name, gamma=1 + gamma, beta=beta, moving_mean=mean, moving_variance=1 + abs(var))

    def get_layer(self, name):
        return next(layer for layer in self.layers if layer.name == name)


def small():
    return resnet_v2.ResNetV2(3, 5, (1, 11, 1, 1), channels_per_group=(8, 4, 8, 8), group_strides=(2, 2, 1, 1))


class TestKeras:
    def test_the_converted_network(self):
        """Also of more than nine blocks, where the name of the first begins those of the tenth and eleventh."""
        model, network = Keras((1, 11, 1, 1), (8, 4, 8, 8), np.random.default_rng(2)), small()
        before = {name: id(variable) for name, variable in network.vars().items()}
        resnet_v2.convert_keras_model(model, network, [1, 11, 1, 1])
        after = {name: id(variable) for name, variable in network.vars().items()}
        assert before.items() <= after.items()  # the same variables, which optimizers and Jit may have
        assert len(after) - len(before) == 1 + 4 + 14
        values = {name: np.asarray(variable.value) for name, variable in network.vars().items()}
        block = "(ResNetV2)[4](ResNetV2BlockGroup)[{}](ResNetV2Block)."
        for number in (0, 9, 10):
            layer = model.get_layer(f"conv3_block{number + 1}_2_conv")
            np.testing.assert_array_equal(values[block.format(number) + "conv_1(Conv2D).w"], layer.kernel.value)
            norm = model.get_layer(f"conv3_block{number + 1}_preact_bn")
            found = values[block.format(number) + "norm_0(BatchNorm2D).running_var"]
            np.testing.assert_array_equal(found.ravel(), norm.moving_variance.value)
        x = np.random.default_rng(3).normal(size=(2, 3, 16, 16)).astype("f")
        groups = [[(2, True)], [(1, True), *[(1, False)] * 9, (2, False)], [(1, True)], [(1, True)]]
        expected = by_hand(x.astype(np.float64), values, groups, True)
        np.testing.assert_allclose(network(x, training=False), expected, rtol=1e-3, atol=1e-4 * np.abs(expected).max())

    def test_without_the_top(self):
        model, network = Keras((1, 11, 1, 1), (8, 4, 8, 8), np.random.default_rng(2), top=False), small()
        head = np.array(network[10].w.value)
        resnet_v2.convert_keras_model(model, network, [1, 11, 1, 1], include_top=False)
        np.testing.assert_array_equal(network[10].w.value, head)
        np.testing.assert_array_equal(network[7].beta.value.ravel(), model.get_layer("post_bn").beta.value)

    def test_another_network(self):
        model, network = Keras((1, 11, 1, 1), (8, 4, 8, 8), np.random.default_rng(2)), small()
        with pytest.raises(AssertionError) as caught:
            resnet_v2.convert_keras_model(model, network, [1, 2, 1, 1])
        assert str(caught.value) == (
            "convert_keras_model: num_blocks are not those of the network.\n"
            "  got:      num_blocks=[1, 2, 1, 1]\n"
            "  expected: [1, 11, 1, 1]"
        )

    def test_a_layer_that_is_missing(self):
        block = resnet_v2.ResNetV2Block(8, 8, 1, use_projection=False, bottleneck=True)
        layers = [SimpleNamespace(name="conv2_block1_1_conv"), SimpleNamespace(name="conv2_block1_2_conv")]
        with pytest.raises(AssertionError) as caught:
            resnet_v2.convert_resblock(layers, block)
        assert str(caught.value) == (
            "convert_resblock: no layer of Keras's block has a name that ends in preact_bn.\n"
            "  got:      conv2_block1_1_conv, conv2_block1_2_conv\n"
            "  fix:      num_blocks, and an architecture, that are those of the Keras model"
        )

    def test_another_shape(self):
        layer = SimpleNamespace(name="conv", kernel=Numbers(np.zeros((1, 1, 4, 8), "f")), bias=None)
        with pytest.raises(AssertionError, match="can not change shape"):
            resnet_v2.convert_conv_or_linear_layer(layer, objax.nn.Conv2D(4, 8, 3))

    def test_a_bias_that_keras_does_not_have(self):
        conv = objax.nn.Conv2D(4, 8, 1)
        layer = SimpleNamespace(name="conv", kernel=np.ones((1, 1, 4, 8), "f"), bias=None)
        resnet_v2.convert_conv_or_linear_layer(layer, conv)
        assert conv.b is None and conv.w.value.sum() == 32


class TestPretrained:
    def test_the_weights_of_keras(self, monkeypatch):
        """A TensorFlow that has only what is asked of it, and a small network in the place of ResNet50."""
        asked, hidden = {}, []

        def resnet50v2(**settings):
            asked.update(settings)
            return Keras((3, 4, 6, 3), (8, 8, 8, 8), np.random.default_rng(4), top=settings["include_top"])

        def little(in_channels, num_classes, normalization_fn):
            widths = (8, 8, 8, 8)
            return resnet_v2.ResNetV2(
                in_channels, num_classes, (3, 4, 6, 3), channels_per_group=widths, normalization_fn=normalization_fn
            )

        set_devices = SimpleNamespace(set_visible_devices=lambda *args: hidden.append(args))
        applications = SimpleNamespace(ResNet50V2=resnet50v2)
        tensorflow = SimpleNamespace(
            keras=SimpleNamespace(applications=applications), config=SimpleNamespace(experimental=set_devices)
        )
        monkeypatch.setitem(sys.modules, "tensorflow", tensorflow)
        monkeypatch.setattr(resnet_v2, "ResNet50", little)
        network = resnet_v2.load_pretrained_weights_from_keras("ResNet50", include_top=False, num_classes=7)
        assert asked == {
            "include_top": False,
            "weights": "imagenet",
            "classes": 1000,
            "classifier_activation": "linear",
        }
        assert hidden == [([], "GPU")]
        assert network(jnp.zeros((1, 3, 32, 32)), training=False).shape == (1, 7)
        assert (network[7].momentum, network[7].eps) == (0.99, 1.001e-05)

    def test_errors(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "tensorflow", None)
        with pytest.raises(AssertionError) as caught:
            resnet_v2.load_pretrained_weights_from_keras("ResNet50")
        assert str(caught.value) == (
            "Please install tensorflow dependency to be able to load keras weights.\n"
            "  got:      no module 'tensorflow'\n"
            "  expected: tensorflow, which nothing else here needs\n"
            "  fix:      pip install tensorflow"
        )
        with pytest.raises(AssertionError) as caught:
            resnet_v2.load_pretrained_weights_from_keras("ResNet18")
        assert str(caught.value) == (
            "Model weights does not exist for ResNet18.\n"
            "  got:      'ResNet18'\n"
            "  expected: 'ResNet50' or 'ResNet101' or 'ResNet152'"
        )
        with pytest.raises(AssertionError) as caught:
            resnet_v2.load_pretrained_weights_from_keras("ResNet50", num_classes=10)
        assert str(caught.value) == (
            "Number of classes should be 1000 when including top layer.\n"
            "  got:      num_classes=10\n"
            "  expected: 1000, those of ImageNet\n"
            "  fix:      include_top=False"
        )
