# SPDX-License-Identifier: Apache-2.0
"""Every error and warning of the library, and the one way their text is built.

An error says what is wrong (its first line is complete by itself), where (the path of the
Variable or Module), what it got, what it expected, and how to mend it. Shapes are written
``dtype[shape]``; the contents of arrays are never printed. Each class also inherits the
builtin that a caller would catch, so ``except ValueError`` keeps working.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = [
    "ArgumentError",
    "DeclarationError",
    "DtypeError",
    "GradientError",
    "LeakError",
    "MissedReadWarning",
    "OptimizerError",
    "PlainTransformError",
    "SealedError",
    "SelectionError",
    "ShapeError",
    "StackedError",
    "StateLostError",
    "StaticError",
    "StructureError",
    "TetherError",
    "TetherWarning",
    "UnusedViewWarning",
    "VmapWriteError",
    "describe",
]


def describe(value: Any) -> str:
    """Writes a value for a message: ``float32[8, 3]`` for an array, else its type and repr.

    Never the contents of an array, and never more than a line.
    """
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if isinstance(shape, tuple) and dtype is not None:
        return f"{dtype}[{', '.join(map(str, shape))}]"
    if isinstance(value, bool | int | float | complex | str | type(None)):
        return repr(value)
    if isinstance(value, type):
        return f"the class {value.__qualname__}"
    if isinstance(value, list | tuple | dict):
        return f"{type(value).__name__} of {len(value)}"
    return f"{type(value).__qualname__} object"


class TetherError(Exception):
    """Base of every error of the library.

    Args:
        what: The whole fault in one line, beginning with the operation (``scan: ...``).
        at: Path and kind of the Variable or Module.
        got: What was given.
        expected: What would have been right.
        fix: One way to mend it, or several; several are numbered.
    """

    def __init__(
        self,
        what: str,
        *,
        at: str | None = None,
        got: str | None = None,
        expected: str | None = None,
        fix: str | Sequence[str] | None = None,
    ):
        super().__init__(what)
        self.what, self.at, self.got, self.expected = what, at, got, expected
        self.fixes = [fix] if isinstance(fix, str) else list(fix or ())

    def __str__(self) -> str:
        rows = [("at:", self.at), ("got:", self.got), ("expected:", self.expected)]
        if len(self.fixes) == 1:
            rows.append(("fix:", self.fixes[0]))
        elif self.fixes:
            rows.append(("fix:", f"one of\n{_numbered(self.fixes)}"))
        return "\n".join([self.what, *(f"  {name:<9} {text}" for name, text in rows if text)])

    def __reduce__(self):
        return (_rebuild, (type(self), self.what, self.at, self.got, self.expected, self.fixes))


def _numbered(fixes: list[str]) -> str:
    return "\n".join(f"    {number}. {text}" for number, text in enumerate(fixes, 1))


def _rebuild(cls, what, at, got, expected, fixes):
    return cls(what, at=at, got=got, expected=expected, fix=fixes)


class ShapeError(TetherError, ValueError):
    """An array of the wrong shape or rank: into a layer, or written to a Variable."""


class DtypeError(TetherError, TypeError):
    """A value of a kind that the Variable can't hold without loss."""


class DeclarationError(TetherError, TypeError):
    """An attribute in ``__init__`` that is neither declared nor a setting."""


class StaticError(TetherError, TypeError):
    """A setting that can't be compared by value."""


class SealedError(TetherError, AttributeError):
    """A change of structure after construction."""


class StructureError(TetherError, ValueError):
    """Two trees that should have one structure and don't."""


class SelectionError(TetherError, KeyError):
    """A path or selection that names nothing."""

    __str__ = TetherError.__str__


class ArgumentError(TetherError, TypeError, ValueError):
    """An argument number or name that the function doesn't have, or a wrong option."""


class LeakError(TetherError, RuntimeError):
    """A Variable that outlived the trace that its value belongs to."""


class PlainTransformError(TetherError, RuntimeError):
    """A plain JAX transformation that can't see a Variable's read or write."""


class VmapWriteError(TetherError, ValueError):
    """A write under vmap that differs from lane to lane, to a shared Variable."""


class StackedError(TetherError, ValueError):
    """A stacked module used as a single one, or a single one as stacked."""


class GradientError(TetherError, TypeError):
    """A gradient that doesn't exist."""


class OptimizerError(TetherError, ValueError):
    """Gradients that don't fit the optimizer, or an optimizer without its model."""


class StateLostError(TetherError, RuntimeError):
    """A donated step failed after its buffers were given away."""


class TetherWarning(UserWarning):
    """Base of every warning of the library."""


class UnusedViewWarning(TetherWarning):
    """A view was made and thrown away; a view changes nothing by itself."""


class MissedReadWarning(TetherWarning):
    """A compiled function reads a Variable that was found only while it was traced."""
