# SPDX-License-Identifier: Apache-2.0
"""Modules: attributes are arrays, nothing becomes a cell silently, sealed, ties kept, calls say where."""

from __future__ import annotations

import abc
import dataclasses
import functools
import inspect
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import pytest

import tether
from tests.modules.models import Net
from tether import nn
from tether.errors import DeclarationError

T = TypeVar("T")


class TestClasses:
    def test_super_init_is_optional(self):
        class Base(tether.Module):
            def __init__(self, size: int):
                super().__init__()
                self.size = size

        class Derived(Base):
            def __init__(self):
                super().__init__(3)
                self.weight = tether.Param(jnp.ones(self.size))

        assert Derived().weight.tolist() == [1, 1, 1]

    @pytest.mark.parametrize("frozen", [False, True])
    def test_dataclass(self, frozen: bool):
        @dataclasses.dataclass(frozen=frozen)
        class Scale(tether.Module):
            weight: Any
            times: int = 3

            def __call__(self, x: Any) -> Any:
                return x * self.weight * self.times

        for start in (1.0, 2.0):  # the second instance finds the class as the first left it
            scale = Scale(tether.Param(jnp.full(2, start)))
            assert scale(jnp.ones(2)).tolist() == [3 * start] * 2
            assert tether.jit(lambda m, x: m(x))(scale, jnp.ones(2)).tolist() == [3 * start] * 2
            assert tether.grad(lambda m: m(jnp.ones(2)).sum())(scale).weight.tolist() == [3, 3]
            assert tether.view(scale, times=5)(jnp.ones(2)).tolist() == [5 * start] * 2
            assert list(tether.variables(jax.tree.map(lambda x: x, scale))) == ["weight"]

    def test_dataclass_default_is_no_attribute_of_all(self):
        @dataclasses.dataclass
        class Maybe(tether.Module):
            bias: Any = None

        assert Maybe().bias is None
        assert Maybe(tether.Param(jnp.ones(1))).bias.tolist() == [1]
        assert Maybe().bias is None

    def test_abc_and_generic(self):
        class Base(tether.Module, Generic[T], abc.ABC):
            def __init__(self):
                self.weight = tether.Param(jnp.ones(2))

            @abc.abstractmethod
            def apply(self) -> Any: ...

        class Real(Base[int]):
            def apply(self) -> Any:
                return self.weight * 2

        assert Real().apply().tolist() == [2, 2]
        with pytest.raises(TypeError, match="abstract"):
            Base()

    def test_mixin(self):
        class Doubling:
            def double(self) -> Any:
                return self.weight * 2

        class Mixed(Doubling, tether.Module):
            def __init__(self):
                self.weight = tether.Param(jnp.ones(2))

        assert Mixed().double().tolist() == [2, 2]

    def test_signature_and_wraps_are_the_users(self):
        assert list(inspect.signature(Net()).parameters) == ["x"]
        assert Net.__call__.__qualname__ == "Net.__call__"
        assert list(inspect.signature(nn.Linear).parameters)[:2] == ["in_features", "out_features"]
        wrapped = functools.wraps(Net())(lambda x: x)
        assert callable(wrapped)


class TestFixedStructure:
    """CASES 2 and 5."""

    def test_calls_change_no_structure(self):
        model = nn.Sequential([nn.Linear(2, 3), nn.BatchNorm(3)])
        before = jax.tree.flatten(model)
        model(jnp.ones((4, 2)))
        after = jax.tree.flatten(model)
        assert after[1] == before[1]
        avals = lambda leaves: [(x.shape, x.dtype, x.weak_type) for x in leaves]
        assert avals(after[0]) == avals(before[0])
        jax.tree.map(jnp.subtract, model, jax.tree.unflatten(before[1], before[0]))

    def test_a_module_is_one_node(self):
        net = Net()
        leaves, treedef = jax.tree.flatten(net)
        assert treedef.num_nodes == len(leaves) + 1
        assert jax.tree.unflatten(treedef, leaves).by_name["a"].tolist() == [1, 1, 1]

    def test_use_as_a_tree_before_it_is_finished(self):
        class Early(tether.Module):
            def __init__(self):
                self.a = tether.Param(jnp.ones(2))
                jax.tree.leaves(self)

        with pytest.raises(DeclarationError, match="before its constructor has returned"):
            Early()
