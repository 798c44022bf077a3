# SPDX-License-Identifier: Apache-2.0
"""Small helpers.

| Objax | here | what differs |
| --- | --- | --- |
| EasyDict, Renamer, ilog2, to_interpolate, to_padding, to_tuple, dummy_context_mgr | the same | errors in words |
"""

from __future__ import annotations

import contextlib
import functools
import math
import re
from collections.abc import Iterator
from numbers import Number
from typing import Any

from tether.compat.objax._errors import MisuseError, UnknownNameError
from tether.compat.objax.constants import ConvPadding, Interpolate
from tether.errors import describe


class EasyDict(dict):
    """A dict whose entries are attributes too."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.__dict__ = self


class Renamer:
    """Renames text.

    Args:
        rules: A function, or ``{part: replacement}``, or pairs ``(compiled pattern, replacement)`` in order.
        chain: A Renamer to apply after it.
    Example:
        >>> objax.util.Renamer({"(Net)": "", "Conv": "C"})("(Net).Conv.w")
        '.C.w'
    """

    def __init__(self, rules: Any, chain: Renamer | None = None):
        self.chain = chain
        if callable(rules):
            self.subfn: Any = rules
        elif isinstance(rules, dict):
            pattern = re.compile("|".join(map(re.escape, rules)))
            self.subfn = functools.partial(pattern.sub, lambda match: rules[match.group(0)])
        else:
            self.subfn = lambda name: functools.reduce(lambda s, rule: rule[0].sub(rule[1], s), rules, name)

    def __call__(self, s: str) -> str:
        name = self.subfn(s)
        return self.chain(name) if self.chain else name


@contextlib.contextmanager
def dummy_context_mgr() -> Iterator[None]:
    """A context that does nothing."""
    yield None


def ilog2(x: float) -> int:
    """The logarithm to base 2, rounded up."""
    return math.ceil(math.log2(x))


def to_interpolate(interpolate: Any) -> str:
    """The method of ``jax.image.resize`` for an Interpolate or its name."""
    if isinstance(interpolate, Interpolate):
        return interpolate.value
    if isinstance(interpolate, str) and interpolate.upper() in Interpolate.__members__:
        return Interpolate[interpolate.upper()].value
    raise (UnknownNameError if isinstance(interpolate, str) else MisuseError)(
        "to_interpolate: this is no interpolation.",
        got=describe(interpolate),
        expected="an objax.Interpolate, or one of the names " + ", ".join(Interpolate.__members__),
    )


def to_padding(padding: Any, ndim: int) -> Any:
    """``'SAME'``, ``'VALID'``, or a pair for each axis."""
    if isinstance(padding, ConvPadding):
        return padding.value
    if isinstance(padding, str):
        if padding.upper() not in ConvPadding.__members__:
            raise UnknownNameError(
                "to_padding: this is no padding.",
                got=describe(padding),
                expected="an objax.ConvPadding, one of the names SAME and VALID, or numbers of pixels",
            )
        return ConvPadding[padding.upper()].value
    if isinstance(padding, int):
        return ((padding, padding),) * ndim
    if isinstance(padding, tuple) and list(map(type, padding)) == [int, int]:
        return (padding,) * ndim
    return tuple(padding)


def to_tuple(v: Any, n: int) -> tuple[Any, ...]:
    """A tuple as it is, a number n times, anything else as a tuple."""
    if isinstance(v, tuple):
        return v
    return (v,) * n if isinstance(v, Number) else tuple(v)
