# SPDX-License-Identifier: Apache-2.0
"""VGG-19: its size, and weights from a file in TensorFlow's order."""

from __future__ import annotations

import math
import pickle

import jax.numpy as jnp
import numpy as np
import pytest

import tether.compat.objax as objax
from tests.compat.objax.zoo import _numpy
from tether._transforms import eval_shape
from tether.compat.objax.zoo import vgg

NAMES = [f"conv{group}_{number}" for group, count in enumerate((2, 2, 4, 4, 4), 1) for number in range(1, count + 1)]


def test_its_size():
    """143,667,240 as in keras.applications and torchvision; 19 layers with weights."""
    shapes = eval_shape(lambda: {name: v.value for name, v in vgg.VGG19().vars().items()})
    assert sum(math.prod(shape.shape) for shape in shapes.values()) == 143_667_240
    assert len(shapes) == 2 * 19
    out = eval_shape(lambda: vgg.VGG19()(jnp.zeros((2, 3, 224, 224))))
    assert out.shape == (2, 1000)


def test_preprocess():
    x = np.random.default_rng(0).integers(0, 256, (2, 3, 4, 5))
    red, green, blue = x[:, 0] - 123.68, x[:, 1] - 116.779, x[:, 2] - 103.939
    expected = np.stack([blue, green, red], axis=1)
    np.testing.assert_allclose(vgg.preprocess(jnp.asarray(x, jnp.float32)), expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(vgg.preprocess(jnp.asarray(x)), expected, rtol=1e-5, atol=1e-5)


@pytest.fixture
def little(monkeypatch, tmp_path):
    """A VGG-19 of few channels for images of 64 pixels, and the folder of its weights."""
    monkeypatch.setattr(vgg, "_WIDTHS", (2, 3, 4, 5, 6))
    monkeypatch.setattr(vgg, "_LINEAR", {"fc6": 7, "fc7": 8, "fc8": 9})
    monkeypatch.setattr(vgg, "_SIDE", 2)
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "objax" / "zoo" / "pretrained"
    folder.mkdir(parents=True)
    return folder


def weights():
    generator = np.random.default_rng(5)
    found, nin = {}, 3
    for name in NAMES:
        nout = (2, 3, 4, 5, 6)[int(name[4]) - 1]
        found[name] = [generator.normal(size=(3, 3, nin, nout)) * (2 / (9 * nin)) ** 0.5, generator.normal(size=nout)]
        nin = nout
    for name, rows, columns in (("fc6", 2 * 2 * 6, 7), ("fc7", 7, 8), ("fc8", 8, 9)):
        found[name] = [generator.normal(size=(rows, columns)), generator.normal(size=columns)]
    return {name: [array.astype(np.float32) for array in pair] for name, pair in found.items()}


def test_pretrained(little):
    """Against float64 in NumPy, whose images have the channels last before the linear layers, as the file has them."""
    kept = weights()
    np.save(little / "vgg19.npy", np.array(kept, dtype=object), allow_pickle=True)
    x = np.random.default_rng(6).normal(size=(2, 3, 64, 64)).astype("f")
    network = vgg.VGG19(pretrained=True)
    h = x.astype(np.float64)
    for place, name in enumerate(NAMES):
        w, b = (array.astype(np.float64) for array in kept[name])
        h = np.maximum(_numpy.conv(h, w, 1, 1, b[:, None, None]), 0)
        if NAMES[place + 1 : place + 2] == [] or NAMES[place + 1][4] != name[4]:
            h = _numpy.max_pool(h, 2, 2)
    h = h.transpose(0, 2, 3, 1).reshape(2, -1)
    for name in ("fc6", "fc7", "fc8"):
        w, b = (array.astype(np.float64) for array in kept[name])
        h = h @ w + b
        h = np.maximum(h, 0) if name != "fc8" else h
    np.testing.assert_allclose(objax.Jit(network)(x), h, rtol=1e-4, atol=1e-4 * np.abs(h).max())
    assert vars(network)["conv3_2"] is network[12] and network.data_dict.keys() == kept.keys()


def old_pickle(value):
    """A dict, list, text or array as Python 2 pickled them: bytes for text, and names of numpy.core."""
    if isinstance(value, dict):
        return b"}(" + b"".join(old_pickle(key) + old_pickle(item) for key, item in value.items()) + b"u"
    if isinstance(value, list):
        return b"](" + b"".join(map(old_pickle, value)) + b"e"
    if isinstance(value, str):
        return b"U" + bytes([len(value)]) + value.encode()
    shape = b"(" + b"".join(b"K" + bytes([length]) for length in value.shape) + b"t"
    is_object = value.dtype == object
    kind, order, flags = (b"O8", b"|", 63) if is_object else (b"f4", b"<", 0)
    none = b"J\xff\xff\xff\xff"
    dtype = b"cnumpy\ndtype\nU\x02" + kind + b"K\x00K\x01\x87R(K\x03U\x01" + order + b"NNN" + none + none
    dtype += b"K" + bytes([flags]) + b"tb"
    raw = value.tobytes()
    data = old_pickle([value.item()]) if is_object else b"T" + len(raw).to_bytes(4, "little") + raw
    made = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
    return made + b"(K\x01" + shape + dtype + b"\x89" + data + b"tb"


def test_a_file_of_python_2(little):
    """As the published file is."""
    kept = weights()
    with (little / "vgg19.npy").open("wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "|O", "fortran_order": False, "shape": ()})
        file.write(b"\x80\x02" + old_pickle(np.array(kept, dtype=object)) + b".")
    network = vgg.VGG19(pretrained=True)
    np.testing.assert_array_equal(network[-1].w.value, kept["fc8"][0])
    np.testing.assert_array_equal(network[0].b.value[:, 0, 0], kept["conv1_1"][1])


def test_no_file(little):
    with pytest.raises(FileNotFoundError) as caught:
        vgg.VGG19(pretrained=True)
    assert str(caught.value) == (
        "VGG19: there are no weights at ./objax/zoo/pretrained/vgg19.npy "
        f"(that is {little.resolve() / 'vgg19.npy'}). Download vgg19.npy from "
        "https://github.com/machrisaa/tensorflow-vgg and save it there, or make a VGG19(pretrained=False)."
    )
    assert len(vgg.VGG19()) == 16 * 2 + 5 + 1 + 5


def test_a_file_that_would_run_something(little):
    class Bad:
        def __reduce__(self):
            return print, ("run",)

    np.save(little / "vgg19.npy", np.array({"fc8": Bad()}, dtype=object), allow_pickle=True)
    with pytest.raises(pickle.UnpicklingError, match=r"has more than arrays in it: builtins\.print"):
        vgg.VGG19(pretrained=True)


def test_a_file_of_another_network(little):
    kept = weights()
    kept["conv2_1"] = kept["conv1_1"]
    np.save(little / "vgg19.npy", np.array(kept, dtype=object), allow_pickle=True)
    with pytest.raises(AssertionError, match="can not change shape"):
        vgg.VGG19(pretrained=True)
