# SPDX-License-Identifier: Apache-2.0
"""Functions of one example, for a batch of them.

| Objax | here | what differs |
| --- | --- | --- |
| Vectorize(f, vc, batch_axis) | ``tether.vmap`` | variables are found; a scalar is the same for all examples |
| a random state | one key for each example | the same keys; found even if vc doesn't name it |
| a variable's ``reduce`` | of what the examples wrote | a variable that none wrote stays as it is |
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from tether._core import frame as _frame
from tether._modules.selection import where
from tether._transforms import vmap
from tether.compat.objax._arguments import positional_args_names
from tether.compat.objax._errors import MisuseError
from tether.compat.objax._names import class_name
from tether.compat.objax._objects import Function, Module, discovered
from tether.compat.objax.variable import (
    BaseVar,
    RandomState,
    TrainRef,
    UnseenStates,
    VarCollection,
    cell_of,
    check_states,
    each,
    reduce_mean,
    unwrapped,
)
from tether.errors import describe


class Vectorize(Module):
    """A function or module of one example, called for all examples of a batch.

    Args:
        f: The function or module.
        vc: The variables that it uses; None, or none, finds them.
        batch_axis: For each argument the axis of the examples, or None if it is the same for all of them.
    Raises:
        MisuseError: not an axis for each argument, an argument without that axis, or batches of several sizes.
    Example:
        >>> f = objax.Vectorize(lambda x, y: (x * y).sum(), batch_axis=(0, None))
        >>> f(jnp.ones((3, 2)), jnp.array([1.0, 2.0])).tolist()
        [3.0, 3.0, 3.0]
    """

    def __init__(
        self, f: Callable[..., Any], vc: VarCollection | None = None, batch_axis: tuple[int | None, ...] = (0,)
    ):
        if not all(axis is None or isinstance(axis, int) for axis in batch_axis):
            raise MisuseError(
                "Vectorize: this is no axis.",
                got=f"batch_axis={batch_axis}",
                expected="a number or None for each argument",
            )
        names = positional_args_names(f)
        if len(batch_axis) < len(names):
            raise MisuseError(
                f"The batched argument must be specified for all of {f} arguments {names}",
                got=f"batch_axis={batch_axis}",
                expected=f"an axis or None for each of {', '.join(names)}",
                fix=f"batch_axis={(*batch_axis, *(0,) * (len(names) - len(batch_axis)))}",
            )
        if all(axis is None for axis in batch_axis):
            raise MisuseError(f"No arguments to function {f} are vectorizable", got=f"batch_axis={batch_axis}")
        self.batch_axis = batch_axis
        self.batch_axis_argnums = [(place, axis) for place, axis in enumerate(batch_axis) if axis is not None]
        self.vc = vc or discovered(f)
        self.__wrapped__ = f if isinstance(f, Module) else Function(f, self.vc)
        self._function = f
        self._states = [variable for variable in each(self.vc) if isinstance(variable, RandomState)]

    def __call__(self, *args: Any) -> Any:
        """Calls the function for each example; the results have an axis of the examples in front."""
        if len(args) != len(self.batch_axis):
            raise MisuseError(
                f"Number of arguments passed {len(args)} must match batched {len(self.batch_axis)}",
                got=f"{len(args)} arguments",
                expected=f"{len(self.batch_axis)}, as batch_axis={self.batch_axis} says",
            )
        args = tuple(map(unwrapped, args))
        axes = tuple(None if _is_scalar(arg) else axis for arg, axis in zip(args, self.batch_axis, strict=True))
        size = self._size(args, axes)
        while True:
            try:
                return self._mapped(axes, size, args)
            except UnseenStates as unseen:
                self._states += unseen.states

    def _mapped(self, axes: Any, size: int, args: Any) -> Any:
        states, before = self._states, [state.value for state in self._states]
        reducing = [variable for variable in each(self.vc) if _reduces_itself(variable)]
        cells, reduced = list(map(cell_of, reducing)), []

        def lane(_: Any, keys: list[Any], *args: Any) -> tuple[Any, Any]:
            for state, key in zip(states, keys, strict=True):
                state.value = key
            out = self._function(*args)
            check_states(states)
            written = _frame.thread.frames[-1].written
            reduced[:] = [variable for variable in reducing if cell_of(variable) in written]
            return out, [variable.value for variable in reduced]

        mapped = vmap(
            functools.partial(lane, self._function),
            in_axes=(0, *axes),
            axis_size=size,
            writes={where(lambda _, cell: cell in cells): "discard"} if cells else None,
        )
        try:
            out, values = mapped([state.split(size) for state in states], *args)
        except Exception:
            for state, value in zip(states, before, strict=True):
                state.value = value
            raise
        for variable, value in zip(reduced, values, strict=True):
            variable.reduce(value)
        return out

    def _size(self, args: Any, axes: Any) -> int:
        """How many examples there are."""
        sizes: dict[str, int] = {}
        for place, (arg, axis) in enumerate(zip(args, axes, strict=True)):
            if axis is None:
                continue
            for leaf in jax.tree.leaves(arg):
                shape = np.shape(leaf)
                if not -len(shape) <= axis < len(shape):
                    raise MisuseError(
                        "Vectorize: an argument has no such axis.",
                        at=f"argument {place}",
                        got=f"{describe(leaf)}, mapped over axis {axis}",
                        expected=f"at least {axis + 1 if axis >= 0 else -axis} axes",
                        fix="None in batch_axis, if the argument is the same for all examples",
                    )
                sizes[f"argument {place}, axis {axis}"] = shape[axis]
        if len(set(sizes.values())) != 1:
            raise MisuseError(
                "Vectorize: the mapped arguments differ in size." if sizes else "Vectorize: no argument is mapped.",
                got=", ".join(f"{name}: {size}" for name, size in sizes.items()) or "scalars alone",
                expected="one number of examples",
                fix="None in batch_axis, if an argument is the same for all examples",
            )
        return next(iter(sizes.values()))

    def __repr__(self) -> str:
        return f"{class_name(self)}(f={self.__wrapped__}, batch_axis={self.batch_axis})"


def _is_scalar(arg: Any) -> bool:
    return isinstance(arg, jax.Array | np.ndarray | np.generic | int | float | complex) and np.ndim(arg) == 0


def _reduces_itself(variable: BaseVar) -> bool:
    """Whether a variable has a ``reduce`` that Tether doesn't know."""
    return not isinstance(variable, TrainRef) and variable._reduce not in (None, reduce_mean)
