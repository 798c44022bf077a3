# SPDX-License-Identifier: Apache-2.0
"""Attributes: declared in the constructor, then fixed; cells read and write as arrays."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tether
from tests.modules.models import Counter, Held, Net
from tether import nn
from tether.errors import DeclarationError, DtypeError, SealedError, ShapeError, TetherError


class TestAttributes:
    def test_read_as_arrays_and_write_the_cell(self):
        net = Net()
        assert type(net.scale) is type(jnp.ones(2))
        cell = tether.cell(net, "scale")
        net.scale = jnp.ones(2)
        assert tether.cell(net, "scale") is cell and cell.value.tolist() == [1, 1]
        net.scale += 1
        assert cell.value.tolist() == [2, 2]

    def test_setting_reads_as_itself(self):
        function = lambda x: x
        for value in (1, 0.5, "a", None, True, function, jnp.float32, nn.Linear):
            assert Held(value).part is value
        assert Held((1, [2, 3])).part == (1, (2, 3))

    def test_containers_are_frozen(self):
        net = Net()
        assert isinstance(net.layers, tuple) and list(net.by_name) == ["a", "b"]
        with pytest.raises(TypeError):
            net.layers[0] = 1
        with pytest.raises(AttributeError):
            net.layers.append(1)

    def test_container_of_cells_reads_as_arrays_and_is_written_whole(self):
        held = Held([tether.Param(jnp.zeros(2)), {"k": tether.State(jnp.zeros(3))}])
        assert held.part[0].tolist() == [0, 0] and held.part[1]["k"].tolist() == [0, 0, 0]
        held.part = [jnp.ones(2), {"k": jnp.full(3, 2.0)}]
        assert held.part[0].tolist() == [1, 1] and held.part[1]["k"].tolist() == [2, 2, 2]

    def test_container_write_is_all_or_nothing(self):
        held = Held([tether.Param(jnp.zeros(2)), tether.State(jnp.zeros(3))])
        for wrong in ([jnp.ones(2), jnp.ones(2)], [jnp.ones(2), "x"]):
            with pytest.raises((ShapeError, DtypeError)):
                held.part = wrong
        for wrong in ([jnp.ones(2)], {"a": jnp.ones(2)}, jnp.ones(2), [jnp.ones(2), [jnp.ones(3)]]):
            with pytest.raises(SealedError):
                held.part = wrong
        assert held.part[0].tolist() == [0, 0]

    def test_a_setting_in_a_container_of_cells_is_sealed(self):
        held = Held([tether.Param(jnp.zeros(2)), 3])
        with pytest.raises(SealedError):
            held.part = [jnp.ones(2), 5]
        assert held.part[1] == 3 and held.part[0].tolist() == [0, 0]
        held.part = [jnp.ones(2), 3]
        assert held.part[0].tolist() == [1, 1]

    def test_dataclass_of_cells_is_written_whole(self):
        @dataclasses.dataclass
        class Pair:
            a: Any
            b: Any

        held = Held(Pair(tether.Param(jnp.zeros(2)), tether.State(jnp.zeros(()))))
        held.part = Pair(jnp.ones(2), jnp.ones(()))
        assert held.part.a.tolist() == [1, 1] and float(held.part.b) == 1

    def test_static_reads_as_its_value(self):
        value = {"any": {1, 2}}
        assert Held(tether.Static(value)).part is value

    def test_missing_attribute(self):
        Held(tether.Param(1.0))
        with pytest.raises(AttributeError, match="nothing"):
            Net().nothing  # noqa: B018
        with pytest.raises(AttributeError, match="part"):
            Held.__new__(Held).part  # noqa: B018
        assert not hasattr(Net(), "nothing") and getattr(Net(), "nothing", 3) == 3

    def test_property_with_a_setter(self):
        class Log(tether.Module):
            def __init__(self):
                self.log_scale = tether.Param(0.0)

            @property
            def scale(self) -> Any:
                return jnp.exp(self.log_scale)

            @scale.setter
            def scale(self, value: Any) -> None:
                self.log_scale = jnp.log(value)

        log = Log()
        log.scale = jnp.asarray(2.0)
        assert float(log.log_scale) == pytest.approx(np.log(2))
        assert float(log.scale) == pytest.approx(2)

    def test_one_class_with_and_without_the_cell(self):
        first, second = Held(tether.Param(jnp.ones(1))), Held(3)
        third = Held(None)
        assert (first.part.tolist(), second.part, third.part) == ([1], 3, None)
        with pytest.raises(SealedError):
            second.part = 4

    def test_dir_and_repr(self):
        net = Net()
        assert {"scale", "layers", "power", "eval"} <= set(dir(net)) and "_tether" not in dir(net)
        assert repr(net).startswith("Net(scale=Param(float32[2], scale), layers=(Counter(")

    def test_repr_of_a_module_that_refers_to_itself(self):
        class Child(tether.Module):
            def __init__(self, parent: Any):
                self.parent = parent

        class Parent(tether.Module):
            def __init__(self):
                self.weight = tether.Param(jnp.ones(2))
                self.child = Child(self)

        parent = Parent()
        assert "Child" in repr(parent)
        assert list(tether.variables(parent)) == ["weight"]
        other = jax.tree.map(lambda x: x + 1, parent)
        assert other.child.parent is other and other.weight.tolist() == [2, 2]


class TestDeclaration:
    @pytest.mark.parametrize("array", [jnp.ones(2), np.ones(2), np.float32(1), [jnp.ones(2)], {"a": (np.ones(2), 1)}])
    def test_bare_array_is_refused(self, array: Any):
        with pytest.raises(DeclarationError, match="must say what it is") as caught:
            Held(array)
        assert caught.value.at is not None and caught.value.at.startswith("Held.part")

    def test_array_appended_later_is_refused(self):
        class Late(tether.Module):
            def __init__(self):
                self.parts = []
                self.parts.append(jnp.ones(2))

        with pytest.raises(DeclarationError) as caught:
            Late()
        assert caught.value.at == "Late.parts[0]"

    @pytest.mark.parametrize(
        "hide",
        [lambda part: frozenset([part]), lambda part: {part}, lambda part: type("Plain", (), {})()],
        ids=["frozenset", "set", "object"],
    )
    def test_a_module_where_nobody_would_find_it_is_refused(self, hide: Any):
        part = nn.Linear(2, 2)
        hidden = hide(part)
        if not isinstance(hidden, set | frozenset):
            hidden.part = part
        with pytest.raises(TetherError):
            Held(hidden)

    def test_tie_by_value_is_refused(self):
        class Tied(tether.Module):
            def __init__(self):
                self.embed = nn.Linear(2, 2)
                self.head = nn.Linear(2, 2)
                self.head.weight = self.embed.weight

        with pytest.raises(DeclarationError, match="by value") as caught:
            Tied()
        assert "tether.cell(" in caught.value.fixes[0]

    def test_a_failed_constructor_leaves_nothing_behind(self):
        shared = nn.Linear(2, 2)
        before = shared.weight
        for _ in range(2):
            with pytest.raises(DeclarationError):
                Held([shared, jnp.ones(2)])
        assert shared.weight is before
        assert list(tether.variables(Held(shared))) == ["part.weight", "part.bias"]
        assert Counter()._tether.sealed

    def test_attributes_can_be_changed_and_deleted_in_the_constructor(self):
        class Changing(tether.Module):
            def __init__(self):
                self.a = tether.Param(jnp.zeros(2))
                self.a = tether.State(jnp.ones(3))
                self.b = 1
                del self.b
                self.n = 1
                self.n += 1

        module = Changing()
        assert (module.a.tolist(), module.n, hasattr(module, "b")) == ([1, 1, 1], 2, False)
        assert isinstance(tether.cell(module, "a"), tether.State)

    def test_deleting_what_is_not_there(self):
        class Deleting(tether.Module):
            def __init__(self):
                del self.nothing

        with pytest.raises(AttributeError, match="nothing"):
            Deleting()


class TestSealed:
    def test_new_attribute(self):
        net = Net()
        with pytest.raises(SealedError, match="added") as caught:
            net.extra = 3
        assert not hasattr(net, "extra") and "__init__" in caught.value.fixes[0]

    def test_nested_part_names_its_path(self):
        net = Net()
        with pytest.raises(SealedError) as caught:
            net.layers[1].extra = 3
        assert (caught.value.at or "").startswith("layers[1].extra")

    @pytest.mark.parametrize("name", ["power", "layers", "by_name"])
    def test_replaced(self, name: str):
        net = Net()
        before = getattr(net, name)
        with pytest.raises(SealedError, match="replaced"):
            setattr(net, name, 3)
        assert getattr(net, name) is before or name == "by_name"

    def test_variable_over_a_cell(self):
        net = Net()
        before = tether.cell(net, "scale")
        with pytest.raises(SealedError):
            net.scale = tether.Param(jnp.ones(2))
        assert tether.cell(net, "scale") is before

    def test_deleted(self):
        net = Net()
        for name in ("scale", "power", "nothing"):
            with pytest.raises(SealedError, match="deleted"):
                delattr(net, name)
        assert net.power == 2

    def test_training_is_switched_by_a_view(self):
        net = Net()
        with pytest.raises(SealedError) as caught:
            net.training = False
        assert "eval()" in " ".join(caught.value.fixes)
        assert net.training is True

    def test_parts_are_open_until_the_outermost_constructor_returns(self):
        class Inner(tether.Module):
            def __init__(self):
                self.a = tether.Param(jnp.zeros(2))

        class Outer(tether.Module):
            def __init__(self):
                self.inner = Inner()
                self.inner.extra = tether.Param(jnp.ones(2))

        outer = Outer()
        assert list(tether.variables(outer)) == ["inner.a", "inner.extra"]
        with pytest.raises(SealedError):
            outer.inner.more = 1


class TestFunctionsThatHideModules:
    """A copy of the module would call the original's."""

    def test_a_method_of_its_own(self):
        class Net(tether.Module):
            def __init__(self):
                self.layer = nn.Linear(2, 2)
                self.apply = self.forward

            def forward(self, x):
                return self.layer(x)

        with pytest.raises(DeclarationError, match="hidden in something that is no container") as caught:
            Net()
        assert "Net.apply" in str(caught.value) and "call its method" in str(caught.value)

    def test_what_a_transformation_made_of_a_module(self):
        with pytest.raises(DeclarationError, match="hidden in something"):
            nn.Lambda(jax.vmap(nn.Linear(2, 2)))

    def test_other_functions_are_settings(self):
        assert nn.Lambda(jax.jit(jnp.tanh))(0.0) == 0.0
        assert nn.Lambda("abc".index).fn("b") == 1
