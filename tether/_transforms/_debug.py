# SPDX-License-Identifier: Apache-2.0
"""Looking at values in passing: at their gradients, in a debugger, at the transformations that they are in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tether._core import frame as _frame
from tether._core import trace as _trace
from tether._transforms._checks import here
from tether._transforms._discovery import is_stateful
from tether._transforms._error_if import FLAG, arrays_of, checked, spoiled_if
from tether._transforms._lanes import any_lane
from tether.errors import describe


def backward_nan(x: Any, name: str | None = None, terminate: bool = True) -> Any:
    """Gives ``x``; when a gradient comes back through it, prints both, and raises if the gradient has a NaN.

    Lanes of ``vmap`` are printed as one array. Forward mode can't pass here.

    Args:
        x: A pytree of arrays. Modules in it are left alone.
        name: What the print and the message call it.
        terminate: Whether a NaN raises, as ``tether.error_if`` does; TETHER_ON_ERROR counts for it, too.
    Raises:
        CheckError: a NaN came back.
    Example:
        >>> f = lambda x: 0 * jnp.sqrt(tether.debug.backward_nan(x, "x"))
        >>> tether.grad(f)(0.0)
        Traceback (most recent call last):
        tether.errors.CheckError: backward_nan: the gradient of x has a NaN...
    """
    arrays, rebuilt = arrays_of(x)
    places = [place for place, array in enumerate(arrays) if jnp.issubdtype(array.dtype, jnp.inexact)]
    through = _watched_on_the_way_back([jnp.ndim(arrays[place]) for place in places], name or "a value", terminate)
    new = dict(zip(places, through([arrays[place] for place in places]), strict=True))
    return rebuilt([new.get(place, array) for place, array in enumerate(arrays)])


def _watched_on_the_way_back(ranks: list[int], name: str, terminate: bool) -> Callable[[list[Any]], list[Any]]:
    at = here()

    def show(*shown: Any) -> np.ndarray:
        half = len(ranks)
        print(f"{name}:\n  value:    {_text(shown[:half])}\n  gradient: {_text(shown[half:])}")
        return np.zeros(np.shape(shown[0])[: np.ndim(shown[0]) - ranks[0]], np.uint8)  # for each lane

    def back(arrays: list[Any], gradients: list[Any]) -> tuple[list[Any]]:
        if not gradients:
            return (gradients,)
        shown = map(_trace.stopped, [*arrays, *gradients])
        # Not a debug.callback, which may come after the check that stops the program.
        gradients = spoiled_if(jax.pure_callback(show, FLAG, *shown, vmap_method="broadcast_all"), gradients)
        if terminate:
            has_nan = jnp.stack([jnp.isnan(gradient).any() for gradient in gradients])
            message = f"the gradient of {name} has a NaN."
            gradients = checked("backward_nan", gradients, has_nan, 0, [message], at=at)
        return (gradients,)

    through = jax.custom_vjp(lambda arrays: arrays)
    through.defvjp(lambda arrays: (arrays, arrays), back)
    return through


def _text(values: Any) -> str:
    return ", ".join(repr(np.asarray(value)) for value in values)


def breakpoint_if(pred: Any, **kwargs: Any) -> None:
    """Opens JAX's debugger when the program runs, if ``pred`` is true then in any lane.

    Args:
        pred: A bool or an array of bools, any of which is enough.
        **kwargs: Of ``jax.debug.breakpoint``.
    Example:
        >>> @tether.jit
        ... def root(x):
        ...     tether.debug.breakpoint_if(x < 0)
        ...     return jnp.sqrt(x)
        >>> root(4.0).item()
        2.0
    """

    def stop() -> None:
        jax.debug.breakpoint(**kwargs)

    jax.lax.cond(any_lane(jnp.asarray(pred).any()), stop, lambda: None)


def announce_transform(x: Any, name: str | None = None, announce: Callable[[str], Any] = print) -> Any:
    """Gives ``x``, and says which transformations each array in it goes through, the outermost first.

    It speaks whenever Python runs here: once for each trace, and not at all when a compiled program runs.

    Args:
        x: A pytree. Modules in it are left alone.
        name: What the line calls it.
        announce: Gets each line.
    Example:
        >>> f = lambda x: tether.debug.announce_transform(x, "x") ** 2
        >>> tether.jit(tether.vmap(tether.grad(f)))(jnp.ones(3)).shape
        x: float32[] in tether.jit, tether.vmap, tether.grad
        (3,)
    """
    names = {id(frame.home): f"tether.{frame.kind}" for frame in _frame.thread.frames}
    for path, leaf in jax.tree_util.tree_leaves_with_path(x, is_leaf=is_stateful):
        if isinstance(leaf, jax.Array):
            traces = reversed(_trace.chain(_trace.owner(leaf)))
            words = ", ".join(names.get(id(trace)) or _trace.transform_name(trace) for trace in traces)
            said = f"{name or 'a value'}{jax.tree_util.keystr(path)}: {describe(leaf)}"
            announce(f"{said} in {words}" if words else f"{said} in no transformation")
    return x
