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
    "CheckError",
    "DeclarationError",
    "DtypeError",
    "GradientError",
    "LeakError",
    "LostUpdateWarning",
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

    @classmethod
    def no_array(cls, kind: str, got: str) -> DtypeError:
        """For what is declared."""
        return cls(
            f"{kind}: the value is no array.",
            got=got,
            expected="an array, a number, or a pytree of those",
            fix=f"{kind}(jnp.asarray(...)); a setting needs no {kind}",
        )

    @classmethod
    def no_key(cls, at: str | None, got: str) -> DtypeError:
        """For a stream."""
        return cls(
            "a PRNG key was expected.",
            at=at,
            got=got,
            expected="jax.random.key(seed), a legacy uint32 key, or a seed",
            fix="jax.random.key(0)",
        )

    @classmethod
    def a_cell(cls, at: str, kind: str, expected: str) -> DtypeError:
        """For a cell where an array belongs."""
        return cls(
            "a cell can't be replaced by writing it.",
            at=at,
            got=f"a {kind}",
            expected=expected,
            fix=["assign the array", "tether.replace(model, {path: variable}) makes a model with that cell replaced"],
        )


class DeclarationError(TetherError, TypeError):
    """An attribute in ``__init__`` that is neither declared nor a setting, or a class without what a base asks for."""


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

    @classmethod
    def over(cls, at: str, where: str) -> LeakError:
        """Of a Variable that was smuggled out of its trace."""
        return cls(
            "a Variable was read outside the transformation that made it.",
            at=at,
            got=f"the value of a trace that is over; the Variable was made at {where}",
            expected="a Variable of this trace, or an array",
            fix="return the module (or the value) from the transformed function and use what the call returns",
        )

    @classmethod
    def not_given(cls, kind: str, at: str) -> LeakError:
        """Of a Variable that a pure function lacks."""
        return cls(
            f"{kind}: the function uses a Variable that it was not given.",
            at=at,
            expected="values for every Variable that the function uses",
            fix="start from pure(f).values(), which has a value for all of them",
        )


class PlainTransformError(TetherError, RuntimeError):
    """A plain JAX transformation that can't see a Variable's read or write."""

    @classmethod
    def unseen(cls, name: str, action: str, reason: str, at: str) -> PlainTransformError:
        """For an access that JAX would get wrong."""
        return cls(
            f"{name}: the function {action}s a Variable that this plain JAX transformation can't see.",
            at=at,
            got=f"a {action} inside {name}; {reason}",
            expected="a Tether transformation around every use of a module made outside",
            fix=_instead(
                name, ["p = tether.pure(f), a plain function: jax.jit(p)(p.values(), ...) returns (out, new_values)"]
            ),
        )

    @classmethod
    def lost_gradient(cls, name: str, at: str) -> PlainTransformError:
        """For a read of what lost its tangent."""
        return cls(
            f"{name}: a Variable is read after it was written, and the gradient through it would be lost.",
            at=at,
            got=f"a read, in the trace of {name} that wrote a value with a tangent",
            expected="no read after such a write, or a transformation that keeps tangents in what is written",
            fix=_instead(name, []),
        )

    @classmethod
    def tangent(cls, name: str, at: str, where: str | None) -> PlainTransformError:
        """For a write of a tangent into a Ref."""
        return cls(
            f"{name}: a value with a tangent is written to a Variable that lives in a jax.Ref.",
            at=at,
            got=f"a Variable that a plain JAX transformation uses, at {where}",
            expected="a value without tangent: a later read would lose the gradient",
            fix=["jax.lax.stop_gradient(value), if no gradient should pass", *_instead(name, [])],
        )

    @classmethod
    def captured(cls, at: str) -> PlainTransformError:
        """For a write of what a plain trace has closed over."""
        return cls(
            "a Variable is written after a plain JAX transformation in the same trace has read it.",
            at=at,
            got="a write, where a cached trace of jax.lax.scan, jax.jit or the like holds the old value",
            expected="no write after such a read",
            fix=[
                "write a copy: new = jax.tree.map(lambda x: x, model), and use it from there on",
                "tether.jit around the whole, with the model as an argument of it",
            ],
        )

    @classmethod
    def custom_rule(cls, name: str, at: str) -> PlainTransformError:
        """For a read in a custom rule."""
        return cls(
            f"{name}: a function with a rule of its own reads a Variable that is transformed here.",
            at=at,
            got="a read in a function of jax.custom_jvp, jax.custom_vjp or the like, which closes over its value",
            expected="the value as an argument of that function",
            fix="pass the array (model.weight) to the function",
        )

    @classmethod
    def lanes(cls, name: str, at: str) -> PlainTransformError:
        """For a write that differs from lane to lane."""
        return cls(
            f"{name}: a write to a shared Variable differs from lane to lane.",
            at=at,
            got=f"a value with a lane of {name}",
            expected="the same value in every lane, as a mean over a named axis is",
            fix=[
                "name the axis and combine over it: jax.vmap(f, axis_name='batch'), BatchNorm(..., axis_name='batch')",
                "tether.vmap(f, writes={select: 'mean' | 'sum' | 'stack' | 'discard'})",
            ],
        )


_NAMESAKES = {
    f"jax.{name}": name for name in ("jit", "grad", "vmap", "checkpoint", "shard_map", "custom_jvp", "custom_vjp")
}
_NAMESAKES |= {f"jax.lax.{name}": name for name in ("scan", "while_loop", "fori_loop", "cond", "switch")}


def _instead(name: str, others: list[str]) -> list[str]:
    """The transformation to use instead; make_jaxpr and eval_shape trace as jit does."""
    if name in _NAMESAKES:
        return [f"tether.{_NAMESAKES[name]} in place of {name}", *others]
    return others or ["tether.jit around the whole"]


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


class CheckError(TetherError, RuntimeError):
    """A check that a program makes of itself failed."""


class TetherWarning(UserWarning):
    """Base of every warning of the library."""


class UnusedViewWarning(TetherWarning):
    """A view was made and thrown away; a view changes nothing by itself."""


class LostUpdateWarning(TetherWarning):
    """A module passed by value to a plain JAX transformation was written there, and the new value dropped."""


class MissedReadWarning(TetherWarning):
    """A compiled function reads a Variable that was found only while it was traced."""
