# SPDX-License-Identifier: Apache-2.0
"""Files of leaves.

| Equinox | here | what differs |
| --- | --- | --- |
| tree_serialise_leaves | ``tether.tree_serialise_leaves`` | a file appears when it is whole |
| tree_deserialise_leaves | ``tether.tree_deserialise_leaves`` | an error has the path of the leaf |
| default_serialise_filter_spec, default_deserialise_filter_spec | Tether's, and StateIndex | typed PRNG keys too |

The files are Equinox's, both ways. Of a StateIndex the state is written: whether there is one, whether it is one array,
else how many, and the arrays.
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Callable
from typing import Any, BinaryIO

import jax
import jax.numpy as jnp
import numpy as np

from tether import tree as _tree
from tether.compat.equinox._errors import FileError, NotSavedError, raised_as
from tether.compat.equinox.experimental.stateful import StateIndex, restore, stored
from tether.compat.equinox.pretty_print import tree_pformat
from tether.errors import describe
from tether.tree._serialise import read_record, with_suffix

__all__ = [
    "default_deserialise_filter_spec",
    "default_serialise_filter_spec",
    "tree_deserialise_leaves",
    "tree_serialise_leaves",
]


def _is_index(node: Any) -> bool:
    return isinstance(node, StateIndex)


def _is_left_out(x: Any) -> bool:
    """Whether it is a scalar of NumPy that is no number of Python: such have no record in Equinox's files."""
    return isinstance(x, np.generic) and not isinstance(x, float | complex)


def default_serialise_filter_spec(f: BinaryIO, x: Any) -> None:
    """Writes a leaf: arrays, numbers and the state of a StateIndex; what is anything else is left out.

    Args:
        f: An open binary file.
        x: The leaf.
    Raises:
        NotImplementedError: A state that is neither an array nor a tuple of arrays.
    Example:
        >>> spec = lambda f, x: None if isinstance(x, int) else eqx.default_serialise_filter_spec(f, x)
        >>> eqx.tree_serialise_leaves("floats.eqx", [1.0, 2, 3.0], spec)
    """
    if _is_index(x):
        _write_state(f, stored(x))
    elif not _is_left_out(x):
        _tree.default_serialise_filter_spec(f, x)


def default_deserialise_filter_spec(f: BinaryIO, x: Any) -> Any:
    """Reads a leaf in the place of one like it; what is neither array, number nor StateIndex comes back as it is.

    Args:
        f: An open binary file.
        x: A leaf like the one that was saved; in place of a StateIndex comes another one, with the state of the file.
    Raises:
        RuntimeError: The file has no record here, or a state of another form than that of ``x``.
    Example:
        >>> eqx.tree_serialise_leaves("wide.eqx", np.ones(2, "float32"))
        >>> spec = lambda f, x: eqx.default_deserialise_filter_spec(f, x).astype(x.dtype)
        >>> eqx.tree_deserialise_leaves("wide.eqx", jnp.ones(2, "bfloat16"), spec).dtype
        dtype(bfloat16)
    """
    if _is_index(x):
        return _read_state(f, x)
    new = x if _is_left_out(x) else _tree.default_deserialise_filter_spec(f, x)
    return jnp.asarray(new) if isinstance(x, jax.Array) else new  # float64 of a program that had it on


def _write_state(f: BinaryIO, state: Any) -> None:
    is_array = isinstance(state, jax.Array)
    if not (state is None or is_array or (isinstance(state, tuple) and all(isinstance(x, jax.Array) for x in state))):
        raise NotSavedError(
            "tree_serialise_leaves: this state is neither an array nor a tuple of arrays.",
            got=tree_pformat(state, width=1000),
            expected="what a file has a form for",
            fix="set_state(index, tuple(jax.tree.leaves(state)))",
        )
    records = [state is not None]
    if state is not None:
        records += [True, state] if is_array else [False, len(state), *state]
    for record in records:
        _tree.default_serialise_filter_spec(f, record)


def _read_state(f: BinaryIO, like: StateIndex) -> StateIndex:
    if not _scalar(f, bool):
        return StateIndex(inference=like.inference)
    is_array = _scalar(f, bool)
    state = tuple(_array(f) for _ in range(1 if is_array else _scalar(f, int)))
    index = copy.deepcopy(like)  # the state of `like` stays as it is, and says what form this one must have
    restore(index, state[0] if is_array else state)
    return index


def _scalar(f: BinaryIO, kind: type) -> Any:
    array = read_record(f)
    value = None if array.ndim else array.item()
    if type(value) is not kind:
        raise FileError(
            "tree_deserialise_leaves: the file has another leaf here.",
            got=describe(array),
            expected=f"{kind.__name__}, of the state of a StateIndex",
            fix="a tree of the structure that was saved",
        )
    return value


def _array(f: BinaryIO) -> jax.Array:
    array = read_record(f)
    return jnp.asarray(array.view(jnp.bfloat16) if array.dtype == "V2" else array)


def tree_serialise_leaves(
    path_or_file: str | os.PathLike[str] | BinaryIO,
    pytree: Any,
    filter_spec: Any = default_serialise_filter_spec,
    is_leaf: Callable[[Any], bool] = _is_index,
) -> None:
    """Writes the leaves of a tree to a file, and the states that its modules keep.

    Args:
        path_or_file: A path, which gets the suffix ``.eqx`` if it has none; or an open binary file.
        pytree: Any tree.
        filter_spec: Function of the file and a leaf that writes it or leaves it out; or a tree of such functions that
            is a prefix of ``pytree``.
        is_leaf: What counts as a leaf, as in ``jax.tree.map``.
    Raises:
        NotImplementedError: A state that is neither an array nor a tuple of arrays.
    Example:
        >>> eqx.tree_serialise_leaves("model.eqx", [jnp.ones(2), 3])
        >>> eqx.tree_deserialise_leaves("model.eqx", [jnp.zeros(2), 0])
        [Array([1., 1.], dtype=float32), 3]
    """
    _tree.tree_serialise_leaves(path_or_file, pytree, filter_spec, is_leaf)


def tree_deserialise_leaves(
    path_or_file: str | os.PathLike[str] | BinaryIO,
    like: Any,
    filter_spec: Any = default_deserialise_filter_spec,
    is_leaf: Callable[[Any], bool] = _is_index,
) -> Any:
    """A tree with leaves from a file; as much of it is read as ``like`` has leaves.

    Args:
        path_or_file: A path, which gets the suffix ``.eqx`` if it has none; or an open binary file.
        like: A tree of the structure that was saved, with leaves of the same types, shapes and dtypes; stays as it is.
        filter_spec: Function of the file and a leaf of ``like`` that reads the new leaf, or gives back the old; or a
            tree of such functions that is a prefix of ``like``.
        is_leaf: What counts as a leaf, as in ``jax.tree.map``.
    Raises:
        RuntimeError: The file has too few leaves, or one of another type, shape or dtype.
    Example:
        >>> eqx.tree_serialise_leaves("numbers.eqx", (1, 2.0))
        >>> eqx.tree_deserialise_leaves("numbers.eqx", (0, 0.0))
        (1, 2.0)
    """
    with contextlib.ExitStack() as stack, raised_as(FileError):
        if isinstance(path_or_file, str | os.PathLike):
            path_or_file = stack.enter_context(open(with_suffix(path_or_file), "rb"))
        return _tree.tree_deserialise_leaves(path_or_file, like, filter_spec, is_leaf)
