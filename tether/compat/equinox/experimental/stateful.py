# SPDX-License-Identifier: Apache-2.0
"""Implicit state: saved by an index, outside of what is passed around.

| Equinox | here | what differs |
| --- | --- | --- |
| StateIndex | an index that holds Tether State cells; nothing of them is a leaf | the number of leaves never changes |
| get_state, set_state | reads and writes of the cells | no host callbacks; bad uses are errors while tracing |

Under plain JAX transformations the cells move into a ``jax.Ref``, under Tether's they are threaded: see
docs/plain_jax.md for where a write is refused. In ``jax.vmap`` what differs from lane to lane is saved with the lanes
in front (``_lanes``); whoever reads it must be in lanes just as many.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from tether._core import State
from tether._core import frame as _frame
from tether._core import trace as _trace
from tether._core.variable import birthplace, own_copy, strong
from tether._transforms._discovery import Searched
from tether.compat.equinox._errors import LeafError, NothingSavedError, StateError
from tether.compat.equinox.experimental._lanes import Outward
from tether.compat.equinox.experimental._mapped import axes_around
from tether.compat.equinox.experimental._mapped import write as write_mapped
from tether.compat.equinox.module import Module, static_field
from tether.errors import describe
from tether.tree import is_array

__all__ = ["StateIndex", "get_state", "set_state"]

in_use: list[bool] = []  # filled with the first index


@dataclasses.dataclass(frozen=True)
class _Form:
    """What every value of one index has in common: the structure, each array, and the lanes that it was saved in."""

    treedef: Any
    avals: tuple[tuple[tuple[int, ...], Any], ...]
    lanes: tuple[tuple[int | None, ...], ...]

    def difference(self, other: _Form) -> str | None:
        """How the other's values differ, in a word."""
        if self.treedef != other.treedef:
            return "structure"
        if self.lanes != other.lanes:
            return "batch axes"
        return None if self.avals == other.avals else "shape or dtype"

    def __str__(self) -> str:
        texts = []
        for (shape, dtype), sizes in zip(self.avals, self.lanes, strict=True):
            lanes = [str(size) for size in reversed(sizes) if size is not None]
            text = f"{dtype}[{', '.join(map(str, shape[len(lanes) :]))}]"
            texts.append(f"{text} in each of {' x '.join(lanes)} lanes" if lanes else text)
        return str(jax.tree.unflatten(self.treedef, texts)).replace("'", "")


class _Cells(Searched):
    """What an index stands for; its identity is the state's."""

    def __init__(self) -> None:
        in_use[:] = [True]
        self.birth = next(_frame.births)  # the cells are made later, and are as old as this for every Frame
        self.variables: list[Any] = []
        self.form: _Form | None = None
        self.is_set = False

    def make(self, form: _Form, values: list[Any]) -> None:
        """Cells for values of a form, unless there are some; what is still being computed is written later."""
        if self.is_set or self.form == form:
            return
        with _trace.inside(_trace.EVALUATING):
            self.variables = [State.make(_initial(value)) for value in values]
        for variable in self.variables:
            variable.birth = self.birth
        self.form = form

    def tree(self) -> Any:
        """The values that lie in the cells, outside all transformations."""
        form = self.form
        return jax.tree.unflatten(form.treedef, [_frame.held(cell) for cell in self.variables]) if form else None


def _own(value: Any) -> Any:
    """The array in a buffer of its own, which no donated call takes away."""
    return strong(own_copy(jnp.asarray(value)))


def _initial(value: Any) -> Any:
    is_known = is_array(value) and _trace.owner(value) is None
    return _own(value) if is_known else jnp.zeros(value.shape, value.dtype)


class StateIndex(Module):
    """What a state is saved under; belongs into a field of a module, as a parameter does.

    It has one leaf, ``inference``. Copies that tree functions make stand for the same state; ``copy.deepcopy`` makes
    another state of equal values.

    Args:
        inference: Whether the state can be read only. A function that ``filter_jit`` or ``jax.jit`` compiles has it as
            an input if the index is among its arguments; of an index that it closes over it keeps the value.
    Example:
        >>> index = eqx.experimental.StateIndex()
        >>> eqx.experimental.set_state(index, jnp.zeros(2))
        >>> jax.jit(lambda x: eqx.experimental.set_state(index, x))(jnp.ones(2))
        >>> eqx.experimental.get_state(index, jnp.zeros(2)).tolist()
        [1.0, 1.0]
    """

    _cells: _Cells = static_field(repr=False)
    inference: bool

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        self = super().__new__(cls)
        vars(self)["_born"] = birthplace()  # also of those that an unflatten makes, inside a transformation
        return self

    def __init__(self, inference: bool = False):
        self._cells = _Cells()
        self.inference = inference

    def unsafe_get(self) -> tuple[Any, Any]:
        """The state as it is outside all transformations, lanes in front; and the lanes.

        Raises:
            KeyError: Nothing was saved.
        """
        if not self._cells.is_set:
            raise NothingSavedError("unsafe_get: nothing was saved under this index yet.")
        return self._cells.tree(), self._cells.form.lanes  # type: ignore[union-attr]

    __hash__ = None  # type: ignore[assignment]  # a wrapper that hashes it would make a constant of the state

    def _is_baked(self) -> bool:
        """Whether a compiled function keeps its value: closed over, and nobody can write it."""
        staged = any(map(_trace.is_staged, _trace.chain(_trace.current())))
        return bool(self.inference) and vars(self)["_born"] is None and staged


def get_state(index: StateIndex, like: Any) -> Any:
    """The state that was saved under an index; no gradient goes through it.

    Args:
        index: What it was saved under.
        like: Arrays of the structure, shapes and dtypes of the state; in ``jax.vmap`` mapped, where the state was.
    Raises:
        TypeError: ``like`` holds something else than arrays.
        RuntimeError: Nothing was saved yet, or something of another form than ``like``.
    Example:
        >>> index = eqx.experimental.StateIndex()
        >>> eqx.experimental.set_state(index, jnp.array(3))
        >>> int(eqx.experimental.get_state(index, jnp.array(0)))
        3
    """
    if not index._cells.is_set:
        raise StateError(
            "get_state: nothing was saved under this index yet.",
            fix="set_state(index, initial) where the index is made, or call the model once in training",
        )
    return recall(index, like)


def recall(index: StateIndex, like: Any) -> Any:
    """``get_state`` of a state that may never have been saved: zeros then."""
    outward, form = _outward("get_state: `like`", like, stop=True)
    cells = index._cells
    cells.make(form, [jax.ShapeDtypeStruct(*aval) for aval in form.avals])
    _check_form("get_state: `like` differs from the saved state in its {}.", cells.form, form)
    if index._is_baked():
        values = [_frame.held(cell) for cell in cells.variables]
    else:
        with _trace.inside(outward.target):
            values = [_frame.read(cell) for cell in cells.variables]
    return jax.tree.unflatten(form.treedef, outward.inward(values))


def set_state(index: StateIndex, state: Any) -> None:
    """Saves arrays under an index, as a side effect.

    Args:
        index: What to save it under.
        state: A pytree of arrays, of the same form as what was saved before.
    Raises:
        TypeError: ``state`` holds something else than arrays.
        RuntimeError: The index is in inference, or what was saved before had another structure, shape, dtype, or other
            batch axes.
        NotImplementedError: A gradient would go through ``state``: save its ``jax.lax.stop_gradient``.
    Example:
        >>> index = eqx.experimental.StateIndex()
        >>> jax.vmap(lambda x: eqx.experimental.set_state(index, x))(jnp.arange(3))
        >>> jax.vmap(lambda x: eqx.experimental.get_state(index, x) + x)(jnp.arange(3)).tolist()
        [0, 2, 4]
    """
    if index.inference:
        raise StateError(
            "set_state: the index is in inference, where a state can be read only.",
            fix="eqx.tree_inference(model, False) for training",
        )
    outward, form = _outward("set_state: `state`", state, stop=False)
    cells = index._cells
    cells.make(form, outward.leaves)
    _check_form("set_state: `state` differs from what was saved before in its {}.", cells.form, form)
    axes = axes_around(outward.target)
    with _trace.inside(outward.target):
        for cell, value in zip(cells.variables, map(_own, outward.leaves), strict=True):
            if axes:
                write_mapped(cell, value, axes)
            else:
                _frame.write(cell, value)
    cells.is_set = True


def stored(index: StateIndex) -> Any:
    """The state of an index as a file holds it: a pytree of arrays, lanes in front; None if nothing was saved."""
    return index._cells.tree() if index._cells.is_set else None


def restore(index: StateIndex, state: Any) -> None:
    """Puts back what ``stored`` gave."""
    cells = index._cells
    if state is None:
        return
    leaves, treedef = jax.tree.flatten(state)
    avals = tuple((leaf.shape, jnp.result_type(leaf)) for leaf in leaves)
    lanes = cells.form.lanes if cells.form is not None and cells.form.treedef == treedef else ((),) * len(leaves)
    form = _Form(treedef, avals, lanes)
    cells.make(form, leaves)
    _check_form("the state that is put back differs from the index's in its {}.", cells.form, form)
    for cell, value in zip(cells.variables, leaves, strict=True):
        _frame.write(cell, _own(value))
    cells.is_set = True


def _outward(what: str, tree: Any, stop: bool) -> tuple[Outward, _Form]:
    """The arrays of a tree as the place has them where the state lies, and their form."""
    leaves, treedef = jax.tree.flatten(tree)
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        if not is_array(leaf):
            raise LeafError(
                f"{what} holds something else than arrays.",
                at=jax.tree_util.keystr(path) or "the whole of it",
                got=describe(leaf),
                expected="arrays",
                fix="jnp.asarray(...) of a number",
            )
    outward = Outward([jnp.asarray(leaf) for leaf in leaves], stop)
    avals = tuple((leaf.shape, leaf.dtype) for leaf in outward.leaves)
    return outward, _Form(treedef, avals, outward.lanes())


def _check_form(what: str, old: _Form | None, new: _Form) -> None:
    part = old.difference(new) if old is not None else None
    if part is not None:
        raise StateError(what.format(part), got=str(new), expected=str(old), fix="save and read one form of state")
