# SPDX-License-Identifier: Apache-2.0
"""What classes ask: abstract names are there, fields are converted, checks run, and on constructed modules alone."""

from __future__ import annotations

import abc
import copy
import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tether
from tests.modules.models import Held
from tether import AbstractClassVar, AbstractVar, nn
from tether._core import frame
from tether.errors import DeclarationError, SealedError, ShapeError


class Sized(tether.Module):
    size: AbstractVar[int]


class Named(tether.Module):
    symbol: AbstractClassVar[str]


def annotated(**annotations: Any) -> Any:
    return type("Annotated", (tether.Module,), {"__annotations__": annotations})


class TestAbstract:
    def test_methods(self):
        class Base(tether.Module):
            @abc.abstractmethod
            def __call__(self, x: Any) -> Any: ...

            @property
            @abc.abstractmethod
            def size(self) -> int: ...

        class Half(Base):
            size = 3

        class Whole(Half):
            def __call__(self, x: Any) -> Any:
                return x

        with pytest.raises(DeclarationError, match="abstract methods: __call__, size"):
            Base()
        with pytest.raises(DeclarationError, match="abstract methods: __call__\n"):
            Half()
        assert Whole()(2) == 2

    @pytest.mark.parametrize("mark", ["AbstractVar", "AbstractClassVar"])
    def test_annotations(self, mark: str):
        kind = getattr(tether, mark)
        for annotation in (kind[int], kind, f"{mark}[int]", f"tether.{mark}[list[Late]]", f"'{mark}[int]'", mark):
            with pytest.raises(DeclarationError, match="size"):
                annotated(size=annotation)()

    @pytest.mark.parametrize("kind", [int, "int", ClassVar[int], "AbstractVariable[int]", "list[AbstractVar[int]]", {}])
    def test_other_annotations_ask_for_nothing(self, kind: Any):
        assert not hasattr(annotated(size=kind)(), "size")

    def test_constructor_provides(self):
        class Setting(Sized):
            def __init__(self, size: int):
                self.size = size

        class Cell(Sized):
            def __init__(self):
                self.size = tether.State(3)

        assert (Setting(2).size, int(Cell().size)) == (2, 3)

    def test_class_provides(self):
        class Attribute(Sized, Named):
            size, symbol = 3, "s"

        class Property(Sized):
            @property
            def size(self) -> int:
                return 4

        class Mixin:
            size = 5

        class Mixed(Sized, Mixin): ...

        assert (Attribute().size, Property().size, Mixed().size, Attribute.symbol) == (3, 4, 5, "s")

    def test_annotation_alone_provides_nothing(self):
        class Promised(Sized):
            size: int

        with pytest.raises(DeclarationError, match="without size"):
            Promised()

    def test_instance_provides_no_class_attribute(self):
        class OfInstance(Named):
            def __init__(self):
                self.symbol = "s"

        with pytest.raises(DeclarationError, match="abstract class attributes: symbol"):
            OfInstance()

    def test_a_cell_of_another_instance_provides_nothing(self):
        class Base(Sized):
            def __init__(self):
                self.size = tether.State(3)

        class Derived(Base):
            def __init__(self): ...

        Base()  # its class now reads a cell
        with pytest.raises(DeclarationError, match="without size"):
            Derived()

    def test_what_holds_a_part_may_provide(self):
        class Outer(tether.Module):
            def __init__(self):
                self.part = Sized()
                self.part.size = 3

        assert Outer().part.size == 3

    def test_dataclass_makes_no_field(self):
        @dataclasses.dataclass
        class Base(Sized):
            width: int
            depth: AbstractVar[int]

        @dataclasses.dataclass
        class Derived(Base):
            depth: int
            size: int

        assert Derived(1, 2, 3) == Derived(width=1, depth=2, size=3)
        with pytest.raises(DeclarationError, match="without size, depth"):
            Base(1)


class Counted:
    """A converter that makes Params and says how often."""

    calls = 0

    def __call__(self, value: Any) -> Any:
        self.calls += 1
        return tether.Param(value)


class TestField:
    @pytest.mark.parametrize("frozen", [False, True])
    def test_converter(self, frozen: bool):
        @dataclasses.dataclass(frozen=frozen)
        class Scale(tether.Module):
            weight: Any = tether.field(converter=tether.Param)
            shift: Any = tether.field(converter=tether.State, default=1.0)

        for start in (1.0, 2.0):  # the second instance finds the class as the first left it
            scale = Scale(np.full(2, start))
            assert list(map(type, tether.variables(scale).values())) == [tether.Param, tether.State]
            assert scale.weight.tolist() == [start] * 2 and float(scale.shift) == 1

    def test_converter_comes_once_and_last(self):
        count = Counted()

        @dataclasses.dataclass
        class Generated(tether.Module):
            weight: Any = tether.field(converter=count)

            def __post_init__(self):
                assert isinstance(self.weight, np.ndarray)
                self.weight = self.weight + 1

        @dataclasses.dataclass
        class Written(Generated):
            def __init__(self, weight: Any):
                self.weight = weight
                assert isinstance(self.weight, np.ndarray)

        assert Generated(np.ones(2)).weight.tolist() == [2, 2] and count.calls == 1
        model = Written(np.ones(2))
        assert model.weight.tolist() == [1, 1] and count.calls == 2
        model.weight = jnp.zeros(2)
        for other in (tether.clone(model), jax.tree.map(jnp.negative, model), copy.deepcopy(model)):
            assert other is not model
        assert tether.grad(lambda m: m.weight.sum())(model).weight.tolist() == [1, 1]
        assert count.calls == 2
        with pytest.raises(ShapeError):
            model.weight = 1.0

    def test_constructor_of_another_base(self):
        class Writes:
            def __init__(self, weight: Any):
                self.weight = weight

        @dataclasses.dataclass
        class Scale(tether.Module):
            weight: Any = tether.field(converter=tether.Param)
            shift: Any = tether.field(converter=tether.Param, default=1.0)

        class Both(Writes, Scale): ...

        assert list(tether.variables(Both(np.ones(2)))) == ["weight", "shift"]

    def test_a_cell_stays_the_cell(self):
        @dataclasses.dataclass
        class Scale(tether.Module):
            weight: Any = tether.field(converter=tether.Param)

        class Tied(tether.Module):
            def __init__(self):
                self.linear = nn.Linear(2, 2)
                self.scale = Scale(tether.cell(self.linear, "weight"))

        assert list(tether.variables(Tied())) == ["linear.weight", "linear.bias"]

    def test_what_a_converter_returns_is_declared(self):
        @dataclasses.dataclass
        class Bare(tether.Module):
            weight: Any = tether.field(converter=jnp.asarray)

        with pytest.raises(DeclarationError, match="must say what it is") as caught:
            Bare(1.0)
        assert caught.value.at == "Bare.weight"

    def test_static(self):
        @dataclasses.dataclass(repr=False)
        class Lookup(tether.Module):
            table: Any = tether.field(static=True, converter=set)
            array: Any = tether.field(static=True, default=None)

            def __call__(self, x: Any) -> Any:
                return x * len(self.table)

        lookup = Lookup([1, 2, 2], np.ones(2))
        assert lookup.table == {1, 2} and isinstance(lookup.array, np.ndarray) and not jax.tree.leaves(lookup)
        assert tether.jit(lambda m, x: m(x))(lookup, 3) == 6
        assert repr(Lookup([1])) == "Lookup(table={1}, array=None)"

    def test_metadata_is_kept(self):
        @dataclasses.dataclass
        class Scale(tether.Module):
            a: Any = tether.field(metadata={"unit": "m"})
            b: Any = tether.field(metadata={"unit": "s"}, static=True, converter=abs)

        assert [dict(field.metadata) for field in dataclasses.fields(Scale)] == [
            {"unit": "m"},
            {"unit": "s", "static": True, "converter": abs},
        ]


class TestCheckInit:
    def test_order(self):
        ran: list[str] = []

        def checked(name: str, *bases: type, **others: Any) -> Any:
            def check_init(module: Any) -> None:
                ran.append(name)

            return type(name, bases, {"__check_init__": check_init, **others})

        base = checked("base", tether.Module)
        part = checked("part", tether.Module)
        child = checked("child", base, __init__=lambda self: setattr(self, "part", part()))
        type("grandchild", (child,), {})()
        assert ran == ["part", "child", "base"]

    def test_the_module_is_finished(self):
        class Checked(tether.Module):
            def __init__(self, change: bool):
                self.weight, self.change = tether.Param(jnp.ones(2)), change

            def __call__(self, x: Any) -> Any:
                return x * self.weight

            def __check_init__(self):
                assert self(3.0).tolist() == tether.jit(self)(3.0).tolist() == [3, 3]
                assert list(tether.variables(self)) == ["weight"] and Held(self).part is self
                if self.change:
                    self.change = False

        assert Checked(False).weight.tolist() == [1, 1]
        with pytest.raises(SealedError, match="replaced"):
            Checked(True)

    def test_an_error_leaves_nothing_behind(self):
        class Checked(Held):
            def __check_init__(self):
                raise ValueError("no")

        shared = nn.Linear(2, 2)
        whole = Held(shared)
        with pytest.raises(ValueError, match="no"):
            Checked([Held(shared)])
        assert frame.thread.constructing is None
        assert tether.cell(whole, "part.weight").describe() == "part.weight  (Param)"
        with pytest.raises(SealedError) as caught:
            shared.extra = 1
        assert (caught.value.at or "").startswith("part.extra")

    def test_copies_are_not_checked(self):
        class Checked(tether.Module):
            def __init__(self):
                self.weight = tether.Param(jnp.ones(2))

            def __check_init__(self):
                ran.append(self)

        class Copies(tether.Module):
            def __init__(self, part: Any):
                self.parts = [tether.clone(part), copy.deepcopy(part)]

        ran: list[Any] = []
        model = Checked()
        Copies(model)
        tether.tree_at(lambda m: m.weight, model, jnp.zeros(2))
        jax.tree.map(jnp.negative, model)
        tether.bind(model, {"weight": jnp.zeros(2)})
        assert model.eval() is not model
        tether.jit(lambda m: m.weight.sum())(model)
        assert ran == [model]
