# SPDX-License-Identifier: Apache-2.0
"""The errors of this package: Tether's, and at the same time what Objax raised, so that old handlers still work."""

from __future__ import annotations

from tether.errors import ArgumentError, TetherError


class MisuseError(ArgumentError, AssertionError):
    """Where Objax had an ``assert``."""


class UnknownNameError(ArgumentError, KeyError):
    """Where Objax looked a name up in an enumeration."""


class NoAxisError(ArgumentError, NameError):
    """Where JAX knows no axis of devices."""


class ConflictError(TetherError, ValueError):
    """Where Objax raised a ValueError: names in conflict, variables missing."""
