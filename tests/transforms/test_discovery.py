# SPDX-License-Identifier: Apache-2.0
"""What discovery must see (CASES 33), and that guards follow names that are bound anew.

The oracle of every case: the function counts its calls in a State and multiplies by a Param; both must be seen
by the compiled function, with one trace.
"""

from __future__ import annotations

import functools
import types
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import pytest

import tether
from tether._transforms._discovery import Reach
from tether.errors import LeakError, MissedReadWarning


class Unit(tether.Module):
    def __init__(self, scale: float = 1.0):
        self.scale = tether.Param(scale)
        self.calls = tether.State(0)

    def __call__(self, x: Any) -> Any:
        self.calls = self.calls + 1
        return x * self.scale

    def method(self, x: Any) -> Any:
        return self(x)

    @property
    def doubled(self) -> Any:
        return self.scale * 2

    @classmethod
    def through_class(cls, x: Any) -> Any:
        return GLOBAL(x)

    @staticmethod
    def through_static(x: Any) -> Any:
        return GLOBAL(x)


GLOBAL = Unit()
IN_LIST = [GLOBAL]
IN_DICT = {"deep": {"er": [GLOBAL]}}
Named = namedtuple("Named", ["unit"])


class Plain:
    """An object that is no Module."""

    def __init__(self, unit: Any):
        self.unit = unit

    def run(self, x: Any) -> Any:
        return self.unit(x)

    def __call__(self, x: Any) -> Any:
        return self.unit(x)


def from_global(x: Any) -> Any:
    return GLOBAL(x)


def from_helper(x: Any) -> Any:
    return from_global(x)


def from_nested(x: Any) -> Any:
    def inner(y: Any) -> Any:
        return sum(GLOBAL(z) for z in [y])

    return inner(x)


def from_list(x: Any) -> Any:
    return IN_LIST[0](x)


def from_dict(x: Any) -> Any:
    return IN_DICT["deep"]["er"][0](x)


def from_default(x: Any, unit: Any = GLOBAL) -> Any:
    return unit(x)


def from_keyword_default(x: Any, *, unit: Any = GLOBAL) -> Any:
    return unit(x)


def wrapped(f: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(f)
    def wrapper(*args: Any) -> Any:
        return f(*args)

    return wrapper


def closure() -> Callable[..., Any]:
    unit = GLOBAL
    return lambda x: unit(x)


def closure_in_list() -> Callable[..., Any]:
    units = [None, [GLOBAL]]
    return lambda x: units[1][0](x)


def late_closure() -> Callable[..., Any]:
    def f(x: Any) -> Any:
        return helper(x)

    def helper(x: Any) -> Any:
        return GLOBAL(x)

    return f


WAYS: dict[str, Callable[..., Any]] = {
    "the module itself": GLOBAL,
    "bound method": GLOBAL.method,
    "class method": Unit.through_class,
    "static method": Unit.through_static,
    "method of a plain object": Plain(GLOBAL).run,
    "callable plain object": Plain(GLOBAL),
    "global": from_global,
    "helper": from_helper,
    "nested function": from_nested,
    "global list": from_list,
    "global dict": from_dict,
    "default": from_default,
    "keyword default": from_keyword_default,
    "partial": functools.partial(lambda unit, x: unit(x), GLOBAL),
    "partial keyword": functools.partial(lambda x, unit: unit(x), unit=GLOBAL),
    "partial of partial": functools.partial(functools.partial(lambda a, u, x: u(x), 1), GLOBAL),
    "wraps": wrapped(from_global),
    "wraps of a method": wrapped(GLOBAL.method),
    "closure": closure(),
    "closure in a list": closure_in_list(),
    "closure filled late": late_closure(),
    "namedtuple": functools.partial(lambda n, x: n.unit(x), Named(GLOBAL)),
    "compiled inside": tether.jit(from_global),
    "checkpointed": tether.checkpoint(from_global),
    "lambda in a dict": functools.partial(lambda d, x: d["f"](x), {"f": lambda x: GLOBAL(x)}),
}


@pytest.mark.parametrize("way", WAYS)
def test_is_found(way: str):
    GLOBAL.calls, GLOBAL.scale = 0, 1.0
    reach = Reach()
    reach.add(WAYS[way], "")
    found = set(reach.variables())
    assert {tether.cell(GLOBAL, "scale"), tether.cell(GLOBAL, "calls")} <= found


@pytest.mark.parametrize(
    "way", ["the module itself", "bound method", "helper", "closure in a list", "wraps", "compiled inside"]
)
def test_compiled_function_sees_values_and_writes(way: str):
    GLOBAL.calls, GLOBAL.scale = 0, 1.0
    f = tether.jit(WAYS[way])
    assert float(f(2.0)) == 2
    GLOBAL.scale = 5.0
    assert float(f(2.0)) == 10
    assert int(GLOBAL.calls) == 2
    assert f.traces == 1


def test_argument_in_containers():
    unit = Unit(3.0)
    f = tether.jit(lambda tree, x: tree["a"][0][1].unit(x))
    for _ in range(2):
        assert float(f({"a": [(None, Named(unit))]}, 2.0)) == 6
    assert int(unit.calls) == 2 and f.traces == 1


def test_module_chosen_at_run_time():
    units = [Unit(float(i)) for i in range(3)]
    f = tether.jit(lambda i, x: units[i](x), static_argnums=0)
    assert [float(f(i, 2.0)) for i in (0, 1, 2)] == [0, 2, 4]
    assert [int(unit.calls) for unit in units] == [1, 1, 1]


def test_names_of_what_is_found():
    first, second = Unit(), Unit()

    def f(model: Any, x: Any) -> Any:
        return model(x) + second(x)

    compiled = tether.jit(f)
    compiled(first, 1.0)
    assert set(compiled.reads) == {"model.scale", "model.calls", "second.scale", "second.calls"}
    assert set(compiled.writes) == {"model.calls", "second.calls"}


class TestGuards:
    """A name that was reached statically is followed when it is bound anew."""

    def test_global(self, monkeypatch: pytest.MonkeyPatch):
        f = tether.jit(from_global)
        GLOBAL.scale = 1.0
        assert float(f(2.0)) == 2
        other = Unit(7.0)
        monkeypatch.setitem(globals(), "GLOBAL", other)
        assert float(f(2.0)) == 14
        assert int(other.calls) == 1 and f.traces == 1
        monkeypatch.undo()
        assert float(f(2.0)) == 2

    def test_closure_cell(self):
        unit = Unit(2.0)

        def f(x: Any) -> Any:
            return unit(x)

        compiled = tether.jit(f)
        assert float(compiled(1.0)) == 2
        first, unit = unit, Unit(3.0)
        assert float(compiled(1.0)) == 3
        assert (int(first.calls), int(unit.calls), compiled.traces) == (1, 1, 1)

    def test_list_item(self):
        units = [Unit(2.0), Unit(3.0)]
        f = tether.jit(lambda x: units[0](x) + units[1](x))
        assert float(f(1.0)) == 5
        units[1] = Unit(5.0)
        assert float(f(1.0)) == 7
        units.append(Unit(1.0))
        assert float(f(1.0)) == 7
        assert [int(unit.calls) for unit in units] == [3, 2, 0]

    def test_dict_item(self):
        units = {"a": Unit(2.0)}
        f = tether.jit(lambda x: units["a"](x))
        assert float(f(1.0)) == 2
        units["a"] = Unit(4.0)
        assert float(f(1.0)) == 4

    def test_attribute_of_a_plain_object(self):
        plain = Plain(Unit(2.0))
        f = tether.jit(plain.run)
        assert float(f(1.0)) == 2
        plain.unit = Unit(4.0)
        assert float(f(1.0)) == 4

    def test_from_none_to_a_module(self):
        units: dict[str, Any] = {"a": None}
        f = tether.jit(lambda x: x if units["a"] is None else units["a"](x))
        assert float(f(2.0)) == 2
        units["a"] = Unit(4.0)
        f_again = tether.jit(lambda x: x if units["a"] is None else units["a"](x))
        assert float(f_again(2.0)) == 8

    def test_tuple_in_a_closure(self):
        units = (Unit(2.0),)

        def f(x: Any) -> Any:
            return units[0](x)

        compiled = tether.jit(f)
        assert float(compiled(1.0)) == 2
        units = (Unit(3.0),)
        assert float(compiled(1.0)) == 3


class TestMissed:
    """A Variable that only reading finds: one more trace, a warning, and the right values."""

    def test_behind_a_registry(self):
        class Registry:
            __slots__ = ("_find",)

            def __init__(self, find: Any):
                self._find = find

        unit = Unit(2.0)
        registry = Registry({"unit": unit})
        f = tether.jit(lambda x: getattr(registry, "_find")["unit"](x))  # noqa: B009
        with pytest.warns(MissedReadWarning, match="found only while"):
            assert float(f(1.0)) == 2
        unit.scale = 5.0
        assert float(f(1.0)) == 5
        assert int(unit.calls) == 2 and f.traces == 2

    def test_does_not_cross_talk(self):
        table = {id(unit): unit for unit in (Unit(1.0), Unit(2.0))}
        keys = list(table)

        class Behind(tether.Module):
            def __init__(self, key: int):
                self.key = key

            def __call__(self, x: Any) -> Any:
                return _lookup(self.key)(x)

        models = [Behind(key) for key in keys]
        TABLE.update(table)
        f = tether.jit(lambda m, x: m(x))
        assert [float(f(model, 1.0)) for model in models for _ in range(2)] == [1, 1, 2, 2]
        assert [int(unit.calls) for unit in table.values()] == [2, 2]


TABLE: dict[int, Any] = {}


def _lookup(key: int) -> Any:
    return TABLE[key]


def test_closure_of_a_function_of_a_library():
    """Its globals are no place for a model; what it closes over is."""
    unit = Unit()
    call = lambda x: unit(x)
    call.__module__ = "jax.numpy"
    step = tether.jit(call)
    step(jnp.ones(()))  # a missed read would warn
    assert step.traces == 1 and len(step.reads) > 0


def test_a_variable_that_a_trace_left_behind():
    """It is in nobody's way, as long as nobody reads it."""
    holder = types.SimpleNamespace(state=tether.State(0.0))

    def fresh(x):
        holder.state = tether.State(x)
        return holder.state.value + 1

    step = tether.jit(fresh)
    assert [float(step(x)) for x in (1.0, 2.0)] == [2, 3]
    with pytest.raises(LeakError, match="outside the transformation that made it"):
        tether.jit(lambda: holder.state.value + 1)()


def test_walk_of_large_and_cyclic_objects_ends():
    cyclic: list[Any] = []
    cyclic.append(cyclic)
    big = list(range(100_000))
    plain = Plain(None)
    plain.unit = plain
    reach = Reach()
    reach.add(lambda: (cyclic, big, plain), "")
    assert reach.variables() == {}


def test_equal_models_share_one_trace():
    """CASES 35."""
    f = tether.jit(lambda m, x: m(x))
    assert [float(f(Unit(float(i)), 1.0)) for i in range(5)] == [0, 1, 2, 3, 4]
    assert f.traces == 1


def test_ties_between_argument_and_closure_are_part_of_the_key():
    first, second = Unit(2.0), Unit(3.0)
    f = tether.jit(lambda m, x: m(x) + first(x))
    assert float(f(second, 1.0)) == 5
    assert float(f(first, 1.0)) == 4
    assert (int(first.calls), int(second.calls)) == (3, 1)


def test_array_globals_are_constants_of_their_time():
    f = tether.jit(lambda x: x + jnp.ones(2))
    assert f(jnp.ones(2)).tolist() == [2, 2]
