# SPDX-License-Identifier: Apache-2.0
"""Loops whose lanes go on for different numbers of steps: one test for all, and lanes that stay as they are."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap


@custom_vmap
def any_lane(go: Any) -> Any:
    """Whether any lane goes on; the same in all of them."""
    return go


@any_lane.def_vmap
def _over_lanes(size: int, mapped: list[bool], go: Any) -> tuple[Any, bool]:
    return any_lane(go.any(0)), False


@custom_vmap
def own_lane(go: Any) -> Any:
    """In a step that some lane makes, whether this one does: surely, where all lanes have one test."""
    return jnp.ones_like(go)


@own_lane.def_vmap
def _in_lanes(size: int, mapped: list[bool], go: Any) -> tuple[Any, bool]:
    return go, True


def chosen(on: Any, new: list[Any], old: list[Any]) -> list[Any]:
    """The new arrays in lanes that are on, the old ones in the others."""
    return [jax.lax.select(on, *pair) for pair in zip(new, old, strict=True)]
