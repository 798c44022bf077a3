# SPDX-License-Identifier: Apache-2.0
"""fori_loop and while_loop: loops that hand on a carry and stack nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tether._core.lift import unpack
from tether._transforms import _arguments
from tether._transforms._body import Body, Operands, Threaded
from tether._transforms._carry import Carry
from tether._transforms._eager import is_eager, run_eagerly
from tether.errors import ArgumentError, describe


def fori_loop(
    lower: Any, upper: Any, body_fun: Callable[..., Any], init_val: Any, *, unroll: int | bool | None = None
) -> Any:
    """Runs ``value = body_fun(i, value)`` for i from ``lower`` to ``upper - 1``.

    Variables that the body writes are carried, as in ``scan``; ``init_val`` follows the rules of scan's carry.

    Args:
        lower: First index, an integer scalar.
        upper: Index after the last one; the loop can be differentiated in reverse if both are Python ints.
        body_fun: The body.
        init_val: The value at the entry.
        unroll: As in ``jax.lax.fori_loop``.
    Example:
        >>> int(tether.fori_loop(0, 5, lambda i, total: total + i, 0))
        10
    """
    _arguments.checked_callable(body_fun, "fori_loop")
    carry, first = Carry("fori_loop", init_val), _first_index(lower, upper)
    if is_eager():
        with contextlib.suppress(jax.errors.ConcretizationTypeError):  # lanes differ
            loop = lambda: _counted(lower, upper, first, body_fun, carry)
            return run_eagerly("fori_loop", [body_fun], (init_val,), loop)
    body = carry.traced(lambda: Body("fori_loop", body_fun, Operands(first, carry.tree), check=carry.checked), body_fun)
    _check_nothing_captured(body)
    threaded = Threaded(body)
    if not first.weak_type:
        lower, upper = (bound if hasattr(bound, "dtype") else first.dtype.type(bound) for bound in (lower, upper))

    def turn(i: Any, state: Any) -> Any:
        arrays, carried = carry.split(state[0])
        index = i if i.dtype == first.dtype else i.astype(first.dtype)
        out, new = body({**threaded.at(state[1]), **carried}, [index, *arrays])
        return out, threaded.state(new)

    out, state = jax.lax.fori_loop(lower, upper, turn, (carry.leaves(), threaded.state()), unroll=unroll)
    threaded.write_back(state)
    return unpack(body.packed, out)


def _first_index(lower: Any, upper: Any) -> jax.ShapeDtypeStruct:
    """The first index as the body sees it: weakly typed where both bounds are Python ints."""
    for name, bound in (("lower", lower), ("upper", upper)):
        is_scalar = isinstance(bound, int | np.generic) or (
            isinstance(bound, jax.Array | np.ndarray) and not bound.ndim
        )
        if not is_scalar or not jnp.issubdtype(jnp.result_type(bound), jnp.integer):
            raise ArgumentError(
                f"fori_loop: {name} is no integer.",
                got=describe(bound),
                expected="an integer scalar",
                fix="int(...) of a number, .astype(jnp.int32) of an array of one",
            )
    typed = {jnp.result_type(bound) for bound in (lower, upper) if not isinstance(bound, int)}
    if len(typed) > 1:
        raise ArgumentError(
            "fori_loop: the bounds are integers of two dtypes.",
            got=f"{describe(lower)} to {describe(upper)}",
            expected="one dtype, or Python ints",
            fix="cast one of them: .astype(jnp.int32)",
        )
    return jax.ShapeDtypeStruct((), jnp.result_type(lower, upper), weak_type=not typed)


def _counted(lower: Any, upper: Any, first: Any, body_fun: Callable[..., Any], carry: Carry) -> Any:
    value = carry.tree
    for i in range(int(lower), int(upper)):
        index = jnp.asarray(i) if first.weak_type else jnp.asarray(i, first.dtype)
        value = carry.checked(body_fun(index, value))
    return value


def while_loop(cond_fun: Callable[[Any], Any], body_fun: Callable[[Any], Any], init_val: Any) -> Any:
    """Runs ``value = body_fun(value)`` as long as ``cond_fun(value)`` is true.

    Variables that either function writes are carried, as in ``scan``; ``init_val`` follows the rules of scan's carry.

    Args:
        cond_fun: Returns a boolean scalar; it, too, may write State and draw random numbers.
        body_fun: The body.
        init_val: The value at the entry.
    Raises:
        ArgumentError: ``cond_fun`` returns no boolean scalar.
    Example:
        >>> int(tether.while_loop(lambda n: n < 100, lambda n: 2 * n, 1))
        128
    """
    _arguments.checked_callable(cond_fun, "while_loop, cond_fun")
    _arguments.checked_callable(body_fun, "while_loop, body_fun")
    carry = Carry("while_loop", init_val)
    if is_eager():
        with contextlib.suppress(jax.errors.ConcretizationTypeError):  # lanes differ
            loop = lambda: _repeated(cond_fun, body_fun, carry)
            return run_eagerly("while_loop", [cond_fun, body_fun], (init_val,), loop)
    body = carry.traced(lambda: Body("while_loop", body_fun, Operands(carry.tree), check=carry.checked), body_fun)
    test = Body("while_loop", cond_fun, Operands(carry.tree), check=_boolean)
    _check_nothing_captured(test, body)
    threaded = Threaded(test, body)

    def run(program: Body, leaves: list[Any], written: list[Any]) -> tuple[list[Any], list[Any]]:
        arrays, carried = carry.split(leaves)
        values = threaded.at(written)
        out, new = program({**values, **carried}, arrays)
        return out, threaded.state({**values, **new})

    if not test.written:
        go_on = lambda state: run(test, *state)[0][0]
        out, state = jax.lax.while_loop(go_on, lambda state: run(body, *state), (carry.leaves(), threaded.state()))
    else:  # the test is a part of each turn, so that what it writes is kept

        def tested(leaves: list[Any], written: list[Any]) -> Any:
            (go_on,), written = run(test, leaves, written)
            return go_on, leaves, written

        turn = lambda state: tested(*run(body, *state[1:]))
        _, out, state = jax.lax.while_loop(lambda state: state[0], turn, tested(carry.leaves(), threaded.state()))
    threaded.write_back(state)
    return unpack(body.packed, out)


def _repeated(cond_fun: Callable[..., Any], body_fun: Callable[..., Any], carry: Carry) -> Any:
    value = carry.tree
    while _boolean(cond_fun(value)):
        value = carry.checked(body_fun(value))
    return value


def _boolean(out: Any) -> Any:
    if not (hasattr(out, "dtype") or isinstance(out, bool)) or jnp.ndim(out) or jnp.result_type(out) != jnp.bool_:
        raise ArgumentError(
            "while_loop: cond_fun returns no truth value.",
            got=describe(out),
            expected="a boolean scalar",
            fix=["compare: lambda value: value > 0", ".any() or .all() of several"],
        )
    return out


def _check_nothing_captured(*bodies: Body) -> None:
    for group in [group for body in bodies for group in body.groups]:
        raise ArgumentError(
            "capture: a value is captured in a loop that stacks nothing, as it may run any number of turns.",
            at=group.path,
            got="fori_loop or while_loop",
            expected="scan or map, which stack it",
            fix="tether.scan(..., length=n), or capture another part",
        )
