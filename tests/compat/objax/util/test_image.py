# SPDX-License-Identifier: Apache-2.0
"""Images: layouts, the 256 levels, and PNG files as Pillow reads them."""

from __future__ import annotations

import io
import sys
import types
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import PIL.Image as PIL
import pytest

from tether.compat.objax.util import image
from tether.errors import ArgumentError

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("array", [np.asarray, jnp.asarray])
class TestLayouts:
    def test_to_and_fro(self, array: Any):
        x = RNG.normal(size=(2, 3, 4, 5)).astype(np.float32)
        assert np.array_equal(image.nchw(array(x)), np.moveaxis(x, -1, -3))
        assert np.array_equal(image.nhwc(array(x)), np.moveaxis(x, -3, -1))
        assert np.array_equal(image.nhwc(image.nchw(array(x[0]))), x[0])
        assert np.array_equal(image.nchw(array(x[None])), np.moveaxis(x[None], -1, -3))

    def test_grid(self, array: Any):
        x = RNG.normal(size=(2, 3, 1, 4, 5)).astype(np.float32)
        grid = image.image_grid(array(x))
        assert grid.shape == (1, 8, 15)
        for row in range(2):
            for column in range(3):
                assert np.array_equal(grid[:, row * 4 : row * 4 + 4, column * 5 : column * 5 + 5], x[row, column])


@pytest.mark.parametrize("array", [np.asarray, jnp.asarray])
class TestLevels:
    def test_all_256_go_and_come_back(self, array: Any):
        levels = array(np.arange(256, dtype=np.uint8))
        floats = image.normalize_to_unit_float(levels)
        np.testing.assert_allclose(floats, (np.arange(256) * 2 + 1) / 256 - 1, rtol=1e-6, atol=1e-7)
        back = image.normalize_to_uint8(floats)
        assert back.dtype == np.uint8 and np.array_equal(back, levels)

    def test_outside(self, array: Any):
        x = array(np.array([-9, -1, 1, 9], np.float32))
        assert image.normalize_to_uint8(x).tolist() == [0, 0, 255, 255]

    def test_the_kind_of_array_stays(self, array: Any):
        kind = type(array(np.zeros(1)))
        x = array(np.zeros(1, np.float32))
        assert isinstance(image.normalize_to_uint8(x), kind) and isinstance(image.normalize_to_unit_float(x), kind)
        assert image.normalize_to_unit_float(x).dtype == np.float32


class TestFiles:
    def test_png_and_back(self, tmp_path: Path):
        pixels = RNG.integers(0, 256, size=(5, 7, 3), dtype=np.uint8)
        x = image.normalize_to_unit_float(pixels.transpose(2, 0, 1))
        for png in (image.to_png(x), image.to_png(jnp.asarray(x, jnp.float32)), image.to_png(pixels)):
            assert np.array_equal(np.asarray(PIL.open(io.BytesIO(png))), pixels)
            np.testing.assert_allclose(image.from_file(io.BytesIO(png)), x, rtol=1e-6)
        (tmp_path / "a.png").write_bytes(image.to_png(x))
        assert image.from_file(str(tmp_path / "a.png")).shape == (3, 5, 7)

    @pytest.mark.parametrize("dtype", [np.float16, np.float64, jnp.bfloat16])
    def test_gray_becomes_color(self, dtype: Any):
        x = np.array([[[-1.0, 1.0]]]).astype(dtype)
        assert np.asarray(PIL.open(io.BytesIO(image.to_png(x)))).tolist() == [[[0] * 3, [255] * 3]]

    def test_a_gray_file(self):
        file = io.BytesIO()
        PIL.fromarray(np.array([[0, 255]], np.uint8)).save(file, "png")
        x = image.from_file(file)
        assert x.tolist() == [[[1 / 256 - 1, 1 - 1 / 256]]] * 3


class TestMistakes:
    @pytest.mark.parametrize(
        ("x", "got", "fix"),
        [
            (np.zeros((3, 2, 2), np.int32), "int32[3, 2, 2]", ""),
            (jnp.zeros((1, 3, 2, 2)), "float32[1, 3, 2, 2]", "\n  fix:      x[0], for one image of a batch"),
        ],
    )
    def test_no_image(self, x: Any, got: str, fix: str):
        with pytest.raises(ValueError) as caught:
            image.to_png(x)
        assert str(caught.value) == (
            "to_png: Unsupported array type, expecting float or uint8 of three axes.\n"
            f"  got:      {got}\n"
            f"  expected: float[channels, height, width] in [-1, 1], or uint8[height, width, channels]{fix}"
        )

    def test_without_pillow(self, monkeypatch: pytest.MonkeyPatch):
        for name in [name for name in sys.modules if name.partition(".")[0] == "PIL"]:
            monkeypatch.delitem(sys.modules, name)

        def find_spec(name: str, *_: Any) -> None:
            if name == "PIL":
                raise ModuleNotFoundError(name=name)

        monkeypatch.setattr(sys, "meta_path", [types.SimpleNamespace(find_spec=find_spec), *sys.meta_path])
        with pytest.raises(ArgumentError) as caught:
            image.to_png(np.zeros((3, 1, 1)))
        assert str(caught.value) == (
            "objax.util.image.to_png: the package Pillow is not installed.\n"
            "  got:      no module 'PIL'\n"
            "  expected: Pillow, which Tether itself doesn't need\n"
            "  fix:      pip install pillow"
        )


def test_traced():
    x = jnp.zeros((3, 2, 2), jnp.uint8)
    assert jax.jit(image.normalize_to_unit_float)(x).dtype == jnp.float32
