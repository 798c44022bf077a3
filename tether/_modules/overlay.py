# SPDX-License-Identifier: Apache-2.0
"""A function run with other values for some Variables: how one layer gives another one a weight that it computes.

A Frame of its own holds the values, as that of a transformation would. So the function, and whatever it calls, reads
them wherever it comes by the Variable; all else that it reads and writes is what it always is, and nothing is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from tether._core import frame as _frame
from tether._core.variable import Variable, coerced
from tether.errors import SealedError

Out = TypeVar("Out")


def called_with(values: dict[Variable, Any], fun: Callable[[], Out]) -> Out:
    """Calls ``fun`` with other values for some Variables, which may be traced; they end with the call.

    What ``fun`` writes to any other Variable is written as usual, draws from streams included.

    Args:
        values: Variable -> array of its shape.
        fun: Takes nothing.
    Raises:
        ShapeError: a value of another shape than the Variable's.
        DtypeError: a value that the Variable's dtype can't hold.
        SealedError: ``fun`` writes one of these Variables: the new value would be of neither.
    """
    given = {variable: coerced(variable, value) for variable, value in values.items()}
    out, written, new = _frame.Frame("called_with").run(given, fun)
    for variable in written:
        if variable in given:
            raise SealedError(
                "a Variable is written while it has another value for the length of a call.",
                at=variable.describe(),
                got="a write by the layer whose weight is computed",
                expected="a layer that only reads it",
                fix="write the Variable outside the layer that computes the weight",
            )
    _frame.write_back(written, new)
    return out
