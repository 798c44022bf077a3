# SPDX-License-Identifier: Apache-2.0
"""Modules as TensorFlow's: with TensorFlow where it is installed, and what is said where it isn't."""

from __future__ import annotations

import importlib.util
import sys

import jax.numpy as jnp
import numpy as np
import pytest

import tether.compat.objax as objax
from tether.errors import ArgumentError


@pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed")
@pytest.mark.filterwarnings("default")  # those of TensorFlow are its own
class TestWithTensorFlow:
    def test_a_layer(self):
        import tensorflow as tf

        layer = objax.nn.Linear(3, 2)
        module = objax.util.Objax2Tf(layer)
        x = np.arange(12, dtype=np.float32).reshape(4, 3)
        assert isinstance(module, tf.Module) and isinstance(module, objax.util.Objax2Tf)
        assert sorted(v.shape.as_list() for v in module.variables) == [[2], [3, 2]]
        np.testing.assert_allclose(module(x), x @ np.asarray(layer.w.value) + np.asarray(layer.b.value), rtol=1e-5)

    def test_a_module_that_writes_and_draws(self):
        layer = objax.nn.Sequential([objax.nn.BatchNorm0D(2), objax.nn.Dropout(0.5, objax.random.Generator(1))])
        module = objax.util.Objax2Tf(objax.ForceArgs(layer, training=True))
        out = np.asarray(module(np.array([[1.0, -1], [3, 1]], np.float32)))
        assert set(np.abs(out).round().ravel().tolist()) <= {0.0, 2.0}
        assert layer[0].running_mean.value.tolist() == [[0, 0]]

    def test_saved_and_loaded(self, tmp_path):
        import tensorflow as tf

        module = objax.util.Objax2Tf(objax.nn.Linear(3, 2))
        x = np.ones((4, 3), np.float32)
        signature = module.__call__.get_concrete_function(tf.TensorSpec([4, 3], tf.float32))
        tf.saved_model.save(module, str(tmp_path), signatures=signature)
        np.testing.assert_allclose(tf.saved_model.load(str(tmp_path))(x), module(x), rtol=1e-6)


class TestMistakes:
    def test_without_tensorflow(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setitem(sys.modules, "tensorflow", None)
        with pytest.raises(ArgumentError) as caught:
            objax.util.Objax2Tf(objax.nn.Linear(1, 1))
        assert str(caught.value) == (
            "objax.util.Objax2Tf: the package tensorflow is not installed.\n"
            "  got:      no module 'tensorflow'\n"
            "  expected: tensorflow, which Tether itself doesn't need\n"
            "  fix:      pip install tensorflow"
        )

    def test_no_module(self):
        with pytest.raises(AssertionError) as caught:
            objax.util.Objax2Tf(jnp.sin)  # type: ignore[arg-type]
        assert str(caught.value) == (
            "Objax2Tf: Input argument to Objax2Tf must be an Objax module.\n"
            "  got:      PjitFunction object\n"
            "  expected: an objax.Module\n"
            "  fix:      objax.Function(f, vc)"
        )
