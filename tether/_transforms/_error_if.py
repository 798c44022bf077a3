# SPDX-License-Identifier: Apache-2.0
"""error_if: an error that depends on values, raised when the program runs.

The check is a ``lax.cond`` around a ``pure_callback`` that raises. Of the callbacks it is the one that every
transformation takes: effects (``io_callback``, ``debug.callback``) are refused by custom rules, by checkpoint or by
vmap, and may outlive the call that they belong to. It has no effect, so something must need its result, a flag that is
always 0: ``x`` is ``where(flag > 0, NaN, x)``. ``custom_vmap`` takes the check out of the lanes, or vmap would make a
``select`` of the ``cond`` and call the host every time; a ``custom_jvp`` lets tangents past it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap

from tether._core import trace as _trace
from tether._transforms._checks import Check
from tether._transforms._discovery import is_stateful
from tether.errors import ArgumentError, describe

_MODES = ("raise", "nan", "breakpoint", "off")
FLAG = jax.ShapeDtypeStruct((), jnp.uint8)


def error_if(x: Any, pred: Any, msg: str, *, on_error: str | None = None) -> Any:
    """Gives ``x``; raises when the program runs, if ``pred`` is true then, compiled or not.

    The check belongs to the arrays of ``x``: it is made once they are used, and dropped by the compiler with them if
    they aren't. Under ``vmap`` one check stands for all lanes, and the message says which ones fail. Tangents pass.
    Where ``cond`` or ``while_loop`` differ from lane to lane, JAX runs them in all lanes, and the check with them.

    Under ``tether.jit`` a failed call raises CheckError and writes nothing. What was donated to it
    (``donate_state=True``) is lost. Other compiled functions raise JAX's error around the message. On several devices
    even that isn't possible: XLA ends the process. There, compile by ``tether.jit``.

    Args:
        x: A pytree with an array in it. Modules are left alone: give an array that they compute.
        pred: A bool or an array of bools, any of which is enough.
        msg: What is wrong, a sentence.
        on_error: "raise"; "nan" goes on with NaN, the largest integer, or True in place of ``x``, in the lanes that
            fail; "breakpoint" opens Python's debugger, then goes on so; "off" checks nothing. None is what the
            environment variable TETHER_ON_ERROR says when the function is traced, and "raise" without one.
    Raises:
        CheckError: ``pred`` is true.
        ArgumentError: ``pred`` holds no bools, or there is no array in ``x``.
    Example:
        >>> @tether.jit
        ... def root(x):
        ...     return jnp.sqrt(tether.error_if(x, x < 0, "x is negative."))
        >>> root(4.0).item()
        2.0
        >>> root(-4.0)
        Traceback (most recent call last):
        tether.errors.CheckError: error_if: x is negative...
    """
    return checked("error_if", x, pred, 0, [msg], on_error)


def branched_error_if(x: Any, pred: Any, index: Any, msgs: Sequence[str], *, on_error: str | None = None) -> Any:
    """``error_if`` with one of several messages, ``msgs[index]``.

    Args:
        x: As in ``error_if``.
        pred: As in ``error_if``.
        index: An integer, or one for each element of ``pred``: then the first that is true has the word.
        msgs: The messages.
        on_error: As in ``error_if``.
    Example:
        >>> x = jnp.array([1.0, jnp.inf, jnp.nan])
        >>> bad = ~jnp.isfinite(x)
        >>> tether.branched_error_if(x, bad, jnp.isnan(x).astype(int), ["x is infinite.", "x is NaN."])
        Traceback (most recent call last):
        tether.errors.CheckError: branched_error_if: x is infinite...
    """
    return checked("branched_error_if", x, pred, index, msgs, on_error)


def checked(
    name: str, x: Any, pred: Any, index: Any, msgs: Sequence[str], on_error: str | None = None, at: str | None = None
) -> Any:
    """``x`` with a check, on behalf of the function that messages name; ``at`` says where, if not here."""
    mode = _mode(name, on_error)
    if mode == "off":
        return x
    pred, index = _scalars(name, pred, index)
    if not isinstance(pred, jax.core.Tracer) and not pred:
        return x
    arrays, rebuilt = arrays_of(x)
    if not arrays and not _is_now(pred, index):
        raise ArgumentError(
            f"{name}: x holds no array that the check could belong to.",
            got=describe(x),
            expected="an array, or a pytree with one",
            fix="give it an array that is used afterwards, and use what it returns",
        )
    if mode == "nan":
        failed = pred
    else:
        looks = mode == "breakpoint"
        failed = _outcome(Check(name, msgs, looks, at), pred, index, *map(_trace.stopped, arrays * looks))
    return rebuilt(spoiled_if(jnp.asarray(failed, jnp.uint8), arrays))


def _mode(name: str, on_error: str | None) -> str:
    mode = os.environ.get("TETHER_ON_ERROR", "raise") if on_error is None else on_error
    if mode not in _MODES:
        raise ArgumentError(
            f"{name}: there is no such way to go on.",
            at="on_error" if on_error is not None else "the environment variable TETHER_ON_ERROR",
            got=repr(mode),
            expected=" or ".join(map(repr, _MODES)),
        )
    return mode


def _scalars(name: str, pred: Any, index: Any) -> tuple[Any, Any]:
    """Whether any element is true, and the index of the first such; as NumPy's where nothing is traced."""
    array = jnp if any(isinstance(value, jax.core.Tracer) for value in (pred, index)) else np
    pred, index = array.asarray(pred), array.asarray(index)
    if pred.dtype != jnp.bool_:
        raise ArgumentError(
            f"{name}: pred holds no bools.",
            got=describe(pred),
            expected="a bool, or an array of bools",
            fix="a comparison, as x < 0",
        )
    if not jnp.issubdtype(index.dtype, jnp.integer) or index.shape not in ((), pred.shape):
        raise ArgumentError(
            f"{name}: this is no index of messages.",
            got=describe(index),
            expected="an integer" + f", or integers of shape {list(pred.shape)}, as pred has them" * bool(pred.ndim),
        )
    if not pred.size:
        return np.asarray(False), index
    return pred.any(), index.reshape(-1)[pred.reshape(-1).argmax()] if index.ndim else index


def arrays_of(x: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """The arrays of a pytree, without those of modules, and what puts others in their place."""
    leaves, treedef = jax.tree.flatten(x, is_leaf=is_stateful)
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, jax.Array | np.ndarray | np.generic)]

    def rebuilt(arrays: list[Any]) -> Any:
        new = dict(zip(places, arrays, strict=True))
        return jax.tree.unflatten(treedef, [new.get(place, leaf) for place, leaf in enumerate(leaves)])

    return [leaves[place] for place in places], rebuilt


def _is_now(*values: Any) -> bool:
    """Whether the values are here, and what is done with them is done now."""
    if any(isinstance(value, jax.core.Tracer) for value in values):
        return False
    return not any(map(_trace.is_staged, _trace.chain(_trace.current())))


def _outcome(check: Check, *values: Any) -> Any:
    """The flag: one for all lanes. ``values`` are pred, index, and what a debugger shows."""
    if _is_now(*values[:2]):
        return check(*values)

    @custom_vmap
    def flag(pred: Any, *others: Any) -> Any:
        called = lambda *values: jax.pure_callback(check, FLAG, *values) * _as_flag(values[0])
        return jax.lax.cond(pred.any(), called, lambda *values: _as_flag(values[0]), pred, *others)

    @flag.def_vmap
    def flag_of_lanes(size: int, is_batched: list[bool], *values: Any) -> tuple[Any, bool]:
        pairs = zip(map(jnp.asarray, values), is_batched, strict=True)
        whole = [value if batched else jnp.broadcast_to(value, (size, *value.shape)) for value, batched in pairs]
        return _outcome(check, *whole), False

    return flag(*map(jnp.asarray, values))


def _as_flag(pred: jax.Array) -> jax.Array:
    return pred.any().astype(jnp.uint8)


@jax.custom_jvp
def spoiled_if(flag: jax.Array, arrays: list[jax.Array]) -> list[jax.Array]:
    """The arrays; where the flag is 1, what nobody takes for good values of theirs."""
    return [jax.lax.select(flag > 0, _spoiled(flag, array), array) for array in map(jnp.asarray, arrays)]


def _spoiled_if_jvp(primals: Any, tangents: Any) -> Any:
    return spoiled_if(*primals), tangents[1]


spoiled_if.defjvp(_spoiled_if_jvp, symbolic_zeros=True)


def _spoiled(flag: jax.Array, array: jax.Array) -> jax.Array:
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(_spoiled(flag, jax.random.key_data(array)), impl=jax.random.key_impl(array))
    if jnp.issubdtype(array.dtype, jnp.inexact):
        bad: Any = jnp.nan
    else:
        bad = True if array.dtype == jnp.bool_ else jnp.iinfo(array.dtype).max
    # A flag is never 2, which XLA does not know: else it would drop the check of an array that it finds to be bad.
    return jax.lax.select(flag > 1, jax.lax.full_like(array, 0), jax.lax.full_like(array, bad))
