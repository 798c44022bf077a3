# SPDX-License-Identifier: Apache-2.0
"""Numbers with infinitesimals: forward-mode derivatives of any order in float64 NumPy.

A number is a sum of arrays, each with a set of directions: ``{}: value``, ``{a}: tangent along a``,
``{a, b}: second derivative along a and b``. A direction is one entry of one thing that is differentiated
by one differentiation (the tag), and two directions of one tag multiply to zero. Each differentiation has
a tag of its own, so nested ones can't be confused.

A number also knows the lanes that it depends on, as far as an operation can say without looking at values.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

TAGS = itertools.count()
VALUE: frozenset[Any] = frozenset()


class Number:
    """A float64 array with infinitesimals.

    Args:
        parts: Set of directions ``(tag, name, index)`` -> array; all of one shape.
        lanes: The lanes that the number may depend on.
    """

    __array_ufunc__ = None  # so that an array on the left leaves the operation to us

    def __init__(self, parts: dict[frozenset[Any], Any], lanes: frozenset[int] = frozenset()):
        self.parts = {key: np.asarray(part, np.float64) for key, part in parts.items()}
        self.lanes = lanes

    @property
    def value(self) -> np.ndarray:
        return self.parts[VALUE]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.value.shape

    def __add__(self, other: Any) -> Number:
        a, b = self, as_number(other)
        return Number({key: a._part(key) + b._part(key) for key in {**a.parts, **b.parts}}, a.lanes | b.lanes)

    def __mul__(self, other: Any) -> Number:
        other, parts = as_number(other), {}
        for (a, left), (b, right) in itertools.product(self.parts.items(), other.parts.items()):
            if not {tag for tag, *_ in a} & {tag for tag, *_ in b}:
                parts[a | b] = parts.get(a | b, 0.0) + left * right
        return Number(parts, self.lanes | other.lanes)

    __radd__, __rmul__ = __add__, __mul__

    def __sub__(self, other: Any) -> Number:
        return self + -1.0 * as_number(other)

    def __getitem__(self, index: Any) -> Number:
        return self._each(lambda part: part[index])

    def sum(self, axis: int | None = None) -> Number:
        return self._each(lambda part: part.sum(axis))

    def mean(self, axis: int | None = None) -> Number:
        return self._each(lambda part: part.mean(axis))

    def column(self) -> Number:
        return self._each(lambda part: part[:, None])

    def astype(self, _: Any) -> Number:
        return self

    def broadcast(self, shape: tuple[int, ...]) -> Number:
        return self._each(lambda part: np.broadcast_to(part, shape))

    def tanh(self) -> Number:
        """By Taylor's series, which ends: a product of more infinitesimals than there are tags is zero."""
        t = np.tanh(self.value)
        step = Number({**self.parts, VALUE: np.zeros(self.shape)}, self.lanes)
        total, power, derivative = Number({VALUE: t}, self.lanes), as_number(1.0), np.polynomial.Polynomial([0.0, 1.0])
        for order in range(1, 1 + len({tag for key in self.parts for tag, *_ in key})):
            power, derivative = power * step, derivative.deriv() * np.polynomial.Polynomial([1.0, 0.0, -1.0])
            total += derivative(t) / math.factorial(order) * power
        return total

    def seeded(self, tag: int, name: str = "") -> Number:
        """The number plus one infinitesimal for each of its entries."""
        units = np.eye(self.value.size).reshape((-1, *self.shape))
        return self + Number({VALUE: 0.0 * self.value, **{frozenset([(tag, name, i)]): u for i, u in enumerate(units)}})

    def jacobian(self, tag: int, shape: tuple[int, ...], name: str = "") -> Number:
        """The derivative by what was seeded: its axes come after those of the number."""
        columns = []
        for index in range(math.prod(shape)):
            at = (tag, name, index)
            column = {key - {at}: part for key, part in self.parts.items() if at in key}
            columns.append(Number({VALUE: np.zeros(self.shape), **column}, self.lanes))
        matrix = stack(columns)._each(lambda part: np.moveaxis(part, 0, -1).reshape((*self.shape, *shape)))
        return matrix.without(tag)

    def without(self, tag: int) -> Number:
        """What is left when a differentiation ends."""
        return Number({k: p for k, p in self.parts.items() if tag not in {t for t, *_ in k}}, self.lanes)

    def stopped(self) -> Number:
        return Number({VALUE: self.value}, self.lanes)

    def has(self, tag: int) -> bool:
        return any(tag == other for key in self.parts for other, *_ in key)

    def out_of(self, lane: int) -> Number:
        return Number(self.parts, self.lanes - {lane})

    def is_same(self, other: Number) -> bool:
        return all(np.array_equal(self._part(key), other._part(key)) for key in {**self.parts, **other.parts})

    def in_lanes(self, lanes: frozenset[int]) -> Number:
        return Number(self.parts, self.lanes | lanes)

    def like(self, _: Any) -> Number:
        return self

    def _part(self, key: frozenset[Any]) -> Any:
        return self.parts.get(key, np.zeros(self.shape))

    def _each(self, fun: Any) -> Number:
        return Number({key: fun(part) for key, part in self.parts.items()}, self.lanes)


def as_number(value: Any) -> Number:
    return value if isinstance(value, Number) else Number({VALUE: value})


def stack(numbers: Sequence[Number]) -> Number:
    keys = {key: None for number in numbers for key in number.parts}
    lanes = frozenset().union(*(number.lanes for number in numbers))
    return Number({key: np.stack([number._part(key) for number in numbers]) for key in keys}, lanes)
