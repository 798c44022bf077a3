# SPDX-License-Identifier: Apache-2.0
"""Names of classes and functions are Objax's."""

from __future__ import annotations

import functools
import inspect

import jax.numpy as jnp

import tether.compat.objax as objax
from tether.compat.objax._names import known_as
from tether.compat.objax.util import class_name, re_sign, repr_function


def test_classes_have_the_modules_of_objax():
    names = {
        "objax.TrainVar": objax.TrainVar(jnp.zeros(1)),
        "objax.ModuleList": objax.ModuleList(),
        "objax.Jit": objax.Jit(abs),
        "objax.GradValues": objax.GradValues(lambda x: x, {}),
        "objax.nn.Linear": objax.nn.Linear(1, 1),
        "objax.nn.BatchNorm2D": objax.nn.BatchNorm2D(1),
        "objax.random.Generator": objax.random.Generator(),
        "objax.optimizer.SGD": objax.optimizer.SGD(objax.VarCollection()),
        "builtins.int": 3,
    }
    assert {class_name(value) for value in names.values()} == set(names)


def test_functions_show_their_defaults():
    def f(x, size=2, *, mode="same"):
        return x

    assert repr_function(f) == "f(*, size=2, mode=same)"
    assert repr_function(functools.partial(f, size=3)) == "f(*, size=3, mode=same)"
    assert repr_function(lambda x: x) == "<lambda>"
    assert repr_function(objax.nn.Linear(1, 1)) == "Linear"


def test_a_signature_of_another():
    def f(x, y=1):
        return x

    assert inspect.signature(re_sign(f)(lambda *args: None)) == inspect.signature(f)


def test_a_partial_known_as_what_it_calls():
    def f(x, y=1):
        return x

    call = known_as(f, functools.partial(lambda *args: None, 3))
    assert call.__name__ == "f" and inspect.signature(call) == inspect.signature(f)
    assert known_as(max, functools.partial(f)).__name__ == "max"
