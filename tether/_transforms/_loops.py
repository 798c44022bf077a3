# SPDX-License-Identifier: Apache-2.0
"""fori_loop and while_loop: loops that hand on a carry and stack nothing."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tether._core.lift import unpack
from tether._transforms import _arguments
from tether._transforms._body import Body, Operands, Threaded
from tether._transforms._bounded import bounded_while
from tether._transforms._carry import Carry
from tether._transforms._checkpointed import checkpointed_while
from tether._transforms._eager import is_eager, run_eagerly
from tether._transforms._one_way import forward_only
from tether._transforms._treeverse import NEVER
from tether.errors import ArgumentError, GradientError, describe


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


def while_loop(
    cond_fun: Callable[[Any], Any],
    body_fun: Callable[[Any], Any],
    init_val: Any,
    *,
    kind: str = "lax",
    max_steps: int | None = None,
    checkpoints: int | None = None,
    base: int = 16,
) -> Any:
    """Runs ``value = body_fun(value)`` as long as ``cond_fun(value)`` is true.

    Variables that either function writes are carried, as in ``scan``; ``init_val`` follows the rules of scan's carry.
    ``kind`` says how the loop can be differentiated:

    - ``"lax"``: in forward mode.
    - ``"checkpointed"``: in reverse mode, and that in forward mode. ``checkpoints`` copies of the carry are kept, and
      the steps between them run again: each about once where there are ``sqrt(2 * steps)`` checkpoints.
    - ``"bounded"``: in both modes, any number of times, as scans in scans; ``max_steps`` is needed, and counts in what
      the loop costs.

    Args:
        cond_fun: Returns a boolean scalar; it, too, may write State and draw random numbers.
        body_fun: The body.
        init_val: The value at the entry.
        kind: As above.
        max_steps: The loop ends after so many steps at the latest, and returns what it has then.
        checkpoints: Of "checkpointed": how many copies, at least 1; left out, ``sqrt(2 * max_steps)``.
        base: Of "bounded": turns of each scan, at least 2. A larger one compiles faster and recomputes less, a smaller
            one takes less memory.
    Raises:
        ArgumentError: ``cond_fun`` returns no boolean scalar; ``max_steps`` and ``checkpoints`` are both left out.
        GradientError: a derivative that a loop of this kind doesn't have.
    Example:
        >>> int(tether.while_loop(lambda n: n < 100, lambda n: 2 * n, 1))
        128
        >>> halve = lambda x: tether.while_loop(lambda x: x > 1, lambda x: x / 2, x, kind="checkpointed", checkpoints=4)
        >>> float(tether.grad(halve)(6.0))
        0.125
    References:
        Stumm and Walther 2010, doi:10.1137/080742439; Wang, Moin and Iaccarino 2009, doi:10.1137/080727890.
    """
    _arguments.checked_callable(cond_fun, "while_loop, cond_fun")
    _arguments.checked_callable(body_fun, "while_loop, body_fun")
    loop = _loop(kind, max_steps, checkpoints, base)
    carry = Carry("while_loop", init_val)
    if is_eager():
        with contextlib.suppress(jax.errors.ConcretizationTypeError):  # lanes differ
            steps = lambda: _repeated(cond_fun, body_fun, carry, max_steps)
            return run_eagerly("while_loop", [cond_fun, body_fun], (init_val,), steps)
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
        out, state = loop(go_on, lambda state: run(body, *state), (carry.leaves(), threaded.state()))
    else:  # the test is a part of each turn, so that what it writes is kept

        def tested(leaves: list[Any], written: list[Any]) -> Any:
            (go_on,), written = run(test, leaves, written)
            return go_on, leaves, written

        turn = lambda state: tested(*run(body, *state[1:]))
        _, out, state = loop(lambda state: state[0], turn, tested(carry.leaves(), threaded.state()))
    threaded.write_back(state)
    return unpack(body.packed, out)


def _loop(kind: str, max_steps: Any, checkpoints: Any, base: Any) -> Callable[..., Any]:
    """The loop on arrays."""
    if kind not in ("lax", "checkpointed", "bounded"):
        raise ArgumentError(
            "while_loop: no such kind.", got=describe(kind), expected='"lax", "checkpointed" or "bounded"'
        )
    for name, count, least in (("max_steps", max_steps, 0), ("checkpoints", checkpoints, 1), ("base", base, 2)):
        if count is not None or name == "base":
            _arguments.checked_count(count, "while_loop", name, least)
    if max_steps is None and kind == "bounded":
        raise ArgumentError("while_loop: kind='bounded' needs max_steps=.", fix="max_steps=n, the most steps")
    if max_steps is None and kind == "checkpointed" and checkpoints is None:
        raise ArgumentError(
            "while_loop: kind='checkpointed' needs checkpoints= or max_steps=.",
            fix=["checkpoints=n: n copies of the carry are kept", "max_steps=n: sqrt(2 n) copies are kept"],
        )
    most = NEVER if max_steps is None else min(max_steps, NEVER)
    if most == 0:
        return lambda test, turn, init: init
    if kind == "lax":
        return functools.partial(_in_forward_mode, most=None if max_steps is None else most)
    if kind == "bounded":
        return functools.partial(bounded_while, most=most, base=base)
    return functools.partial(checkpointed_while, most=most, checkpoints=checkpoints)


def _in_forward_mode(test: Callable[[Any], Any], turn: Callable[[Any], Any], init: Any, most: int | None) -> Any:
    if most is None:
        out = jax.lax.while_loop(test, turn, init)
    else:
        more = lambda state: test(state[1]) & (state[0] < most)
        out = jax.lax.while_loop(more, lambda state: (state[0] + 1, turn(state[1])), (jnp.int32(0), init))[1]
    leaves, treedef = jax.tree.flatten(out)
    return treedef.unflatten(forward_only(leaves, _backward))


def _backward() -> GradientError:
    return GradientError(
        "while_loop: a loop of any number of steps is differentiated in reverse mode.",
        got="kind='lax', which keeps nothing of its steps",
        fix=["kind='checkpointed', checkpoints=n: n copies of the carry are kept", "kind='bounded', max_steps=n"],
    )


def _repeated(cond_fun: Callable[..., Any], body_fun: Callable[..., Any], carry: Carry, max_steps: int | None) -> Any:
    value, step = carry.tree, 0
    while _boolean(cond_fun(value)) and step != max_steps:
        value, step = carry.checked(body_fun(value)), step + 1
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
