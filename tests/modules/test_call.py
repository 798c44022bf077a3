# SPDX-License-Identifier: Apache-2.0
"""The wrapper around every ``__call__``: mode, key, scopes, and errors that say where."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import tether
from tests.modules.models import Held, Net
from tether import nn
from tether.errors import ShapeError, StackedError


def call_part(outer: Any) -> Any:
    return outer.part[0](jnp.ones((2, 3)))


class TestCalls:
    def test_every_module_takes_training_and_key(self):
        class Mode(tether.Module):
            def __call__(self) -> Any:
                return self.training, jax.random.uniform(tether.random.draw())

        class Outer(tether.Module):
            def __init__(self):
                self.inner = Mode()

            def __call__(self) -> Any:
                return self.inner()

        outer = Outer()
        assert outer()[0] is True and outer(training=False)[0] is False
        assert outer.eval()()[0] is False and outer.eval()(training=True)[0] is True
        expected = jax.random.uniform(jax.random.split(jax.random.key(3))[1])
        assert float(outer(key=jax.random.key(3))[1]) == float(expected)
        assert outer.inner()[0] is True

    def test_own_arguments_of_these_names_are_passed_on(self):
        class Own(tether.Module):
            def __call__(self, x: Any, *, key: Any = None, training: Any = None) -> Any:
                return x, key, training, self.training

        assert Own()(1, key=3, training=False) == (1, 3, False, False)

    def test_mode_ends_with_the_call_even_if_it_raises(self):
        class Raising(tether.Module):
            def __call__(self) -> Any:
                raise ValueError("boom")

        with pytest.raises(ValueError, match="boom"):
            Raising()(training=False, key=jax.random.key(0))
        assert Held(1).training is True
        assert tether._core.frame.thread.stream is None

    def test_jit_on_call(self):
        class Compiled(tether.Module):
            def __init__(self):
                self.calls = tether.State(0)

            @tether.jit
            def __call__(self, x: Any) -> Any:
                self.calls = self.calls + 1
                return x if self.training else -x

        module = Compiled()
        assert float(module(1.0)) == 1 and float(module(1.0, training=False)) == -1 and float(module.eval()(1.0)) == -1
        assert int(module.calls) == 3

    def test_note_of_path_and_shapes(self):
        class Bad(tether.Module):
            def __call__(self, x: Any) -> Any:
                raise ValueError("boom")

        outer = Held([Bad()])
        with pytest.raises(ValueError, match="boom") as caught:
            call_part(outer)
        assert caught.value.__notes__ == ["in part[0]  (Bad), called with float32[2, 3]"]

    def test_error_of_the_library_gets_its_path(self):
        outer = Held([nn.Linear(2, 3)])
        with pytest.raises(ShapeError) as caught:
            call_part(outer)
        assert caught.value.at == "part[0]  (Linear)"

    @pytest.mark.parametrize("copied", [copy.deepcopy, tether.clone, lambda m: pickle.loads(pickle.dumps(m))])
    def test_copies_know_their_paths(self, copied: Any):
        outer = copied(Held([nn.Linear(2, 3)]))
        with pytest.raises(ShapeError) as caught:
            call_part(outer)
        assert caught.value.at == "part[0]  (Linear)"

    def test_scope_names_reach_the_program(self):
        text = tether.jit(Net()).lower(jnp.ones(2)).as_text(debug_info=True)
        assert "layers_1" in text

    def test_stacked_is_refused(self):
        stacked = tether.stack([nn.Linear(2, 2), nn.Linear(2, 2)])
        with pytest.raises(StackedError, match="as a single one"):
            stacked(jnp.ones(2))
