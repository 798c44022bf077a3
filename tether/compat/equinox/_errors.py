# SPDX-License-Identifier: Apache-2.0
"""The errors of this package: Tether's, and at the same time what Equinox raised, so that old handlers still work."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

from tether.errors import ArgumentError, ShapeError, StructureError, TetherError


class FieldError(TetherError, ValueError):
    """Where Equinox raised a ValueError about the fields of a module."""


class FrozenError(TetherError, dataclasses.FrozenInstanceError):
    """Where a module is changed; an AttributeError."""


class SpecError(ArgumentError):
    """Where Equinox raised a ValueError about an argument, a specification of leaves or of axes."""


class RankError(ShapeError, AssertionError):
    """Where Equinox asserted the rank of an input."""


class CallError(TetherError, RuntimeError):
    """Where Equinox raised a RuntimeError at a call of a layer."""


class AxisError(ArgumentError, NameError):
    """Where JAX knows no axis of this name."""


class LeafError(ArgumentError, TypeError):
    """Where Equinox raised a TypeError: a leaf of another kind."""


class StateError(TetherError, RuntimeError):
    """Where Equinox raised a RuntimeError: state that was never set, or has another form."""


class NothingSavedError(StateError, KeyError):
    """Where Equinox looked a state up."""

    __str__ = StateError.__str__  # a KeyError shows the repr of its text


class NotDifferentiableError(TetherError, NotImplementedError):
    """Where a gradient would go through what is put into a state."""


class FileError(StructureError, RuntimeError):
    """Where Equinox raised a RuntimeError: a file of leaves that doesn't fit the tree."""


class NotSavedError(TetherError, NotImplementedError):
    """Where a state has a form that files don't have."""


@contextlib.contextmanager
def raised_as(cls: type[TetherError]) -> Iterator[None]:
    """Raises the StructureErrors of the block as errors of a class that old handlers know."""
    try:
        yield
    except StructureError as error:
        raise cls(error.what, at=error.at, got=error.got, expected=error.expected, fix=error.fixes) from error.__cause__
