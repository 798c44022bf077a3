# SPDX-License-Identifier: Apache-2.0
"""Arrays that can be differentiated in one direction only: the other one is an error that says what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

SymbolicZero = jax.custom_derivatives.SymbolicZero

# The identity of one tangent. In forward mode a tangent is computed; in reverse mode the identity is transposed.
_tangent = Primitive("one_way")


def reverse_only(leaves: list[Any], error: Callable[[], Exception]) -> list[Any]:
    """The same arrays; a tangent of theirs that is computed is the error, but not one of a cotangent."""
    return _marked(leaves, error, None)


def forward_only(leaves: list[Any], error: Callable[[], Exception]) -> list[Any]:
    """The same arrays; a cotangent that is sent back through them is the error."""
    return _marked(leaves, None, error)


def _marked(leaves: list[Any], forward: Any, reverse: Any) -> list[Any]:
    @jax.custom_jvp
    def same(*leaves: Any) -> Any:
        return leaves

    def rule(leaves: Any, tangents: Any) -> Any:
        mark = lambda t: t if isinstance(t, SymbolicZero) else _tangent.bind(t, forward=forward, reverse=reverse)
        return leaves if reverse is None else same(*leaves), tuple(map(mark, tangents))

    same.defjvp(rule, symbolic_zeros=True)
    return list(same(*leaves))


def _computed(tangent: Any, *, forward: Any, reverse: Any) -> Any:
    if forward is not None:
        raise forward()
    return tangent


def _transposed(cotangent: Any, _: Any, *, forward: Any, reverse: Any) -> list[Any]:
    if reverse is not None:
        raise reverse()
    return [cotangent]


_tangent.def_impl(_computed)
_tangent.def_abstract_eval(lambda tangent, **_: tangent)
ad.deflinear2(_tangent, _transposed)
batching.defvectorized(_tangent)
mlir.register_lowering(_tangent, lambda context, tangent, **directions: [_computed(tangent, **directions)])
