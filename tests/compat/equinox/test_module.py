# SPDX-License-Identifier: Apache-2.0
"""Equinox's Module: its constructors, what it is as a pytree, its methods, and what can't be changed."""

from __future__ import annotations

import abc
import copy
import dataclasses
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import pytest

import tether.compat.equinox as eqx
from tether.compat.equinox.module import Static, update_wrapper

T = TypeVar("T")


class Scale(eqx.Module):
    """Multiplies."""

    factor: Any
    name: str = eqx.static_field(default="scale")

    def __call__(self, x: Any) -> Any:
        return self.factor * x

    def plus(self, x: Any, one: Any = 1) -> Any:
        return self(x) + one


class Own(eqx.Module):
    a: Any
    b: Any

    def __init__(self, total: Any):
        self.a = total
        self.b = total - self.a
        self.a = 1  # a field may be set twice


class TestConstructor:
    def test_it_takes_the_fields(self):
        assert (Scale(1).factor, Scale(1).name) == (1, "scale")
        assert Scale(factor=1, name="a").name == "a"

    def test_ones_own_is_inherited_and_none_is_made(self):
        class Child(Own):
            pass

        class Grown(Own):
            c: Any = 5

        assert (Child(3).a, Child(3).b, Grown(3).c) == (1, 0, 5)
        with pytest.raises(TypeError, match="unexpected keyword"):
            Grown(3, c=1)

    def test_post_init_sees_and_sets_fields(self):
        class Doubled(eqx.Module):
            x: Any
            twice: Any = dataclasses.field(init=False)

            def __post_init__(self):
                self.twice = 2 * self.x

        assert Doubled(3).twice == 6

    def test_one_that_fails_leaves_nothing_open(self):
        made = []

        class Failing(eqx.Module):
            x: Any

            def __init__(self):
                made.append(self)
                raise RuntimeError("mine")

        with pytest.raises(RuntimeError, match="mine"):
            Failing()
        with pytest.raises(AttributeError, match="can't be changed after __init__"):
            made[0].x = 1

    def test_generic_and_abstract_classes(self):
        class Base(eqx.Module, Generic[T]):
            @abc.abstractmethod
            def f(self) -> Any: ...

        class Made(Base[int]):
            x: int = 2

            def f(self) -> Any:
                return self.x

        assert Made().f() == 2
        with pytest.raises(TypeError, match="abstract"):
            Base()


class TestPytree:
    def test_fields_in_order_with_names(self):
        leaves = jax.tree_util.tree_flatten_with_path({"m": Own(2)})[0]
        assert [(jax.tree_util.keystr(path), leaf) for path, leaf in leaves] == [("['m'].a", 1), ("['m'].b", 0)]

    def test_static_fields_are_structure(self):
        one, two = jax.tree.structure(Scale(1)), jax.tree.structure(Scale(1, name="other"))
        assert one.num_leaves == 1 and one != two and one == jax.tree.structure(Scale("x"))
        assert jax.tree.map(lambda x: x + 1, Scale(1, name="kept")).name == "kept"

    def test_no_constructor_runs_and_what_is_not_set_stays_unset(self):
        class Late(eqx.Module):
            x: Any
            y: Any = dataclasses.field(init=False)

        copied = jax.tree.map(lambda x: x + 1, Late(1))
        assert copied.x == 2 and not hasattr(copied, "y")
        assert jax.tree.map(lambda _: None, Own(2)).a is None

    def test_under_transformations(self):
        assert jax.jit(lambda m: m(2.0))(Scale(jnp.array(3.0))) == 6
        stacked = jax.vmap(Scale)(jnp.arange(3.0))
        assert jax.vmap(lambda m, x: m(x), (0, None))(stacked, 2.0).tolist() == [0, 2, 4]


class TestMethods:
    def test_a_method_is_a_pytree_of_its_module(self):
        module = Scale(jnp.array(3.0))
        assert isinstance(module.plus, jax.tree_util.Partial)
        assert [x is module.factor for x in jax.tree.leaves(module.plus)] == [True]
        assert jax.jit(lambda f, x: f(x, one=2.0))(module.plus, 4.0) == 14
        assert module.plus(1.0, one=0.0) == Scale.plus(module, 1.0, 0.0) == 3

    def test_of_the_class_above(self):
        class Child(Scale):
            def plus(self, x: Any, one: Any = 10) -> Any:
                return super().plus(x, one)

        assert Child(2).plus(3) == 16

    def test_other_attributes_of_a_class_are_what_they_are(self):
        class Various(eqx.Module):
            x: int

            @property
            def half(self) -> float:
                return self.x / 2

            @classmethod
            def zero(cls) -> Any:
                return cls(0)

            @staticmethod
            def add(a: int, b: int) -> int:
                return a + b

        assert (Various(1).half, Various.zero().x, Various(1).add(1, 2)) == (0.5, 0, 3)


def test_equality_hash_and_text():
    assert Scale(1) == Scale(1) and hash(Scale(1)) == hash(Scale(1))
    assert Scale(1) != Scale(2) and Scale(1) != Scale(1, name="other") and Scale(1) != 1
    assert Scale(jnp.ones(2)) == Scale(jnp.ones(2))
    assert repr(Scale(jnp.ones(2))) == "Scale(factor=f32[2], name='scale')"
    with pytest.raises(TypeError, match="unhashable"):
        hash(Scale(jnp.ones(2)))


def test_copies():
    module = Scale([jnp.ones(2)])
    assert copy.copy(module).factor is module.factor
    deep = copy.deepcopy(module)
    assert deep == module and deep.factor is not module.factor


def test_static_value_is_structure():
    assert jax.tree.leaves(Static("a")) == [] and Static("a").value == "a"
    assert jax.tree.structure(Static("a")) != jax.tree.structure(Static("b"))


def test_update_wrapper_gives_the_names_of_what_is_wrapped():
    def wrapped(x: int) -> None:
        """Says what."""

    module = update_wrapper(Scale(1), wrapped)
    assert (module.__name__, module.__doc__, module.__wrapped__) == ("wrapped", "Says what.", wrapped)
    assert jax.tree.leaves(module) == [1]


class Wrong(eqx.Module):
    a: Any

    def __init__(self):
        self.c = 1


class Empty(eqx.Module):
    a: Any
    b: Any

    def __init__(self):
        pass


def assign(module: Any, name: str) -> None:
    setattr(module, name, 2)


FIELD = "eqx.tree_at(lambda module: module.{}, module, {}) is another module, {}"
CASES = [
    (
        lambda: assign(Own(1), "a"),
        AttributeError,
        "a module can't be changed after __init__.\n  at:       Own.a\n  got:      2\n"
        f"  fix:      {FIELD.format('a', 'value', 'with that value')}",
    ),
    (
        lambda: assign(Scale(1), "name"),
        dataclasses.FrozenInstanceError,
        "a module can't be changed after __init__.\n  at:       Scale.name\n  got:      2\n"
        "  fix:      dataclasses.replace(module, name=value)",
    ),
    (
        lambda: assign(Scale(1), "other"),
        AttributeError,
        "a module can't be changed after __init__.\n  at:       Scale.other\n  got:      2\n"
        "  fix:      declare it in the class body, other: Any, and set it in __init__",
    ),
    (
        Wrong,
        AttributeError,
        "a module's __init__ sets something that is no field.\n  at:       Wrong.c\n  got:      1\n"
        "  fix:      declare it in the class body, c: Any, and set it in __init__",
    ),
    (
        lambda: delattr(Own(1), "a"),
        AttributeError,
        "a module can't be changed: nothing is deleted from it.\n  at:       Own.a\n"
        f"  fix:      {FIELD.format('a', 'None', 'without it')}",
    ),
    (
        Empty,
        ValueError,
        "a module's __init__ leaves fields without a value.\n  at:       Empty\n  got:      no value for a, b\n"
        "  fix:      set self.a in __init__, or give the field a default",
    ),
    (
        lambda: eqx.static_field(metadata={"static": 1}),
        ValueError,
        "static_field: the metadata has an entry 'static' already.\n  got:      static=1\n"
        "  fix:      leave it out: static_field sets it",
    ),
]


@pytest.mark.parametrize(("fault", "kind", "text"), CASES)
def test_mistake(fault: Any, kind: type[Exception], text: str):
    with pytest.raises(kind) as caught:
        fault()
    assert str(caught.value) == text


def test_the_fixes_work():
    module = Scale(1)
    assert eqx.tree_at(lambda module: module.factor, module, 2).factor == 2
    assert dataclasses.replace(module, name="other").name == "other"
