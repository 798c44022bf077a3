# SPDX-License-Identifier: Apache-2.0
"""Records of compilations: how a setting is said, and that recording asks nothing of the user's objects."""

from __future__ import annotations

import dataclasses
import enum
import functools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import tether
from tests.transforms.jit_models import Counter
from tether import nn
from tether._modules.module import structure_of
from tether._transforms._call import arrays_and_others, reach_of
from tether._transforms._record import Record, _text, listed


class Color(enum.Enum):
    RED = 1


@dataclasses.dataclass(frozen=True)
class Config:
    rate: float
    act: Any = None


@jax.tree_util.register_static
class Rude:
    def __repr__(self):
        raise RuntimeError("no")


class Bare:
    pass


def act(x, *, slope=0.1):
    return x * slope


def test_text_of_a_setting():
    cyclic: list[Any] = [1]
    cyclic.append(cyclic)
    for value, text in [
        *[(0.5, "0.5"), (True, "True"), ("a", "'a'"), (None, "None"), (Color.RED, "<Color.RED: 1>"), (Bare, "Bare")],
        *[((1, (2,)), "(1, (2,))"), ([1, "a"], "[1, 'a']"), ({"a": [1]}, "{'a': [1]}"), (Bare(), "Bare object")],
        *[(Config(0.1), "Config(rate=0.1, act=None)"), (tether.Static(Config(1)), "Config(rate=1, act=None)")],
        *[(jax.nn.relu, "relu"), (jnp.tanh, "tanh"), (jnp.float32, "float32"), (len, "len"), (Rude(), "Rude object")],
        *[
            (np.zeros((2, 3)), "float64[2, 3]"),
            (jnp.ones(4), "float32[4]"),
            (Config(0.1, np.ones(2)).act, "float64[2]"),
        ],
        (functools.partial(pow, 2, mod=3), "partial(pow, 2, mod=3)"),
        (Config(0.1, (jnp.ones(2),)), "Config(rate=0.1, act=(float32[2],))"),
        (cyclic, "[1, [1, [1, [1, [...]]]]]"),
    ]:
        assert _text(value) == text
    for long in ("a" * 200, tuple(range(1000)), [["b" * 50] * 5] * 5):
        assert len(_text(long)) <= 80 and "..." in _text(long)


def test_text_of_functions_says_where_they_stand_and_what_they_capture():
    line, size, table = act.__code__.co_firstlineno, 3, jnp.ones(3)
    assert _text(act) == f"act (test_record.py:{line})"
    inner = lambda x: x * size + table[later]
    assert _text(inner) == f"<lambda> (test_record.py:{inner.__code__.co_firstlineno}, size=3)"
    later = 0


def test_listed():
    assert listed(()) == "nothing"
    assert listed(tuple("abcdefgh")) == "a, b, c, d, e, f, g, h"
    assert listed(tuple("abcdefghij")) == "a, b, c, d, e, f, g, h and 2 more"


class Everything(tether.Module):
    """Every form that a part of a module can have."""

    def __init__(self):
        self.cell = tether.Param(jnp.ones(2))
        self.cache = tether.State({"k": jnp.zeros(2), "v": jnp.zeros(3)})
        self.by_name = {"a": nn.Linear(2, 2), "b": tether.State(0, reduce="mean")}
        self.layers = [Counter(), nn.Dropout(0.5)]
        self.again = self.layers[0]
        self.names = ("x", "y")


def record_of(*args: Any) -> Record:
    fun = lambda *args: None
    reach = reach_of(fun, args, {})
    lifted, fixed = arrays_and_others(reach)
    return Record(reach, lifted, fixed)


def test_every_part_of_a_module_has_its_place():
    model = Everything()
    entries, _ = record_of(model).entries({})
    texts = {place: text for place, (_, text) in entries.items() if place[0].startswith("args[0]")}
    of = lambda path, what="": texts["args[0]" + path, what]
    assert (of(""), of(".training"), of(".cell"), of(".names[1]")) == ("Everything", "True", "Param", "'y'")
    assert (of(".cache['v']", "cell"), of(".cache['v']", "value")) == ("State", "float32[3]")
    assert (of(".by_name", "container"), of(".by_name['b']")) == ("a dict", "State, reduce='mean'")
    assert (of(".layers", "container"), of(".layers[0]"), of(".layers[1].p")) == ("tuple", "Counter", "0.5")
    assert of(".again") == "the same as layers[0]"
    values = {place for place, what in texts if what == "value"}
    assert values == {f"args[0].{path}" for path in structure_of(model).paths}


def test_equal_models_have_equal_records():
    numbers = [{place: said[0] for place, said in record_of(Everything()).entries({})[0].items()} for _ in range(2)]
    assert numbers[0] == numbers[1]


def test_a_repr_that_raises_breaks_no_call():
    step = tether.jit(lambda x: 0)
    assert int(step([Rude()])) == 0
    assert int(step((1.0,))) == 0
    assert tether.explain(step).compilations[1].reasons == ("x[0]: absent -> float32[] (a Python float)",)


def test_recording_two_hundred_layers_is_quick():
    model = nn.Sequential([nn.BatchNorm(2) for _ in range(200)])
    reach = reach_of(model, (), {})
    lifted, fixed = arrays_and_others(reach)
    spent = []
    for _ in range(5):
        start = time.perf_counter()
        Record(reach, lifted, fixed)
        spent.append(time.perf_counter() - start)
    assert min(spent) < 0.01  # seconds; tracing them takes a hundred times as long
