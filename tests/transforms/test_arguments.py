# SPDX-License-Identifier: Apache-2.0
"""Numbers and names of arguments: the user's signature, Python's negatives, errors that print it."""

from __future__ import annotations

import functools

import pytest

import tether
from tether._transforms._arguments import StaticArguments, as_tuple, name_of, parameters, positions
from tether.errors import ArgumentError


def energy(x, y, z=1, *, scale=2):
    return x * y * z * scale


class Model(tether.Module):
    def loss(self, x, y):
        return x * y

    def __call__(self, x, flag):
        return x


@pytest.mark.parametrize(
    ("numbers", "found"),
    [(None, ()), (0, (0,)), (2, (2,)), (-1, (2,)), (-3, (0,)), ("y", (1,)), ((0, "z"), (0, 2)), ([2, 0], (2, 0))],
)
def test_positions(numbers, found):
    assert positions(numbers, energy, 3, "argnums") == found


@pytest.mark.parametrize("numbers", [3, -4, "scale", "w", True, 1.0, (0, 0), (0, "x"), (2, -1), object()])
def test_wrong_positions_print_the_signature_and_the_option(numbers):
    with pytest.raises(ArgumentError, match=r"(?s)argnums.*energy\(x, y, z=1, \*, scale=2\).*3 positional"):
        positions(numbers, energy, 3, "argnums")


def test_range_is_that_of_the_call():
    assert positions(-1, energy, 2, "argnums") == (1,)
    with pytest.raises(ArgumentError, match=r"\[-2, 2\)"):
        positions(2, energy, 2, "argnums")
    with pytest.raises(ArgumentError):
        positions("z", energy, 2, "argnums")


def test_parameters_are_those_of_the_call():
    assert list(parameters(energy)) == ["x", "y", "z"]
    assert list(parameters(Model().loss)) == ["x", "y"]
    assert list(parameters(Model.loss)) == ["self", "x", "y"]
    assert list(parameters(Model())) == ["x", "flag"]
    assert list(parameters(functools.partial(energy, 1))) == ["y", "z"]
    assert list(parameters(tether.jit(energy))) == ["x", "y", "z"]
    assert parameters(max) == {} or "x" not in parameters(max)


def test_variadic_functions_take_any_number():
    fun = lambda *args: sum(args)
    assert positions((0, -1), fun, 4, "argnums") == (0, 3)
    assert float(tether.grad(fun, argnums=-1)(1.0, 2.0, 3.0)) == 1.0


def test_as_tuple_and_names():
    assert as_tuple(None) == () and as_tuple(0) == (0,) and as_tuple([1, "a"]) == (1, "a")
    assert name_of(energy) == "energy" and name_of(Model()) == "Model"


class TestStatic:
    def test_positions_by_number_and_name(self):
        static = StaticArguments(energy, (-1,), "y")
        assert static.positions(3) == {1, 2}
        assert StaticArguments(energy, None, None).is_empty

    def test_argument_left_at_its_default(self):
        assert StaticArguments(energy, 2, None).positions(2) == frozenset()

    def test_names_that_are_not_there(self):
        with pytest.raises(ArgumentError, match=r"energy\(x, y"):
            StaticArguments(energy, None, "w")
        StaticArguments(lambda **options: options, None, "anything")
        StaticArguments(energy, None, "scale")

    def test_numbers_that_are_not_there(self):
        with pytest.raises(ArgumentError, match="static_argnums"):
            StaticArguments(energy, 5, None).positions(3)
