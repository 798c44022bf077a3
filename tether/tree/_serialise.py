# SPDX-License-Identifier: Apache-2.0
"""Files of leaves: one ``.npy`` record after another, in the order of the leaves, as Equinox has them.

Nothing of the structure is in such a file: it is read into the leaves of a tree like the one that was saved. A *spec*
says how one leaf is written, or read; a file appears under its name when it is whole.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np

from tether._core import Variable
from tether._core.variable import Cells, is_key
from tether.errors import ArgumentError, StructureError, TetherError, describe
from tether.tree._mismatch import structure_error

__all__ = [
    "default_deserialise_filter_spec",
    "default_serialise_filter_spec",
    "read_record",
    "tree_deserialise_leaves",
    "tree_serialise_leaves",
    "with_suffix",
]

_SAVE, _LOAD = "tree_serialise_leaves", "tree_deserialise_leaves"
_NUMBERS = bool | int | float | complex | np.generic


def default_serialise_filter_spec(f: BinaryIO, x: Any) -> None:
    """Writes a leaf: arrays and numbers; what is anything else is left out.

    Args:
        f: An open binary file.
        x: The leaf. Of typed PRNG keys the data are written.
    Raises:
        ArgumentError: an array without numbers, or a Variable by itself.
    Example:
        >>> spec = lambda f, x: None if isinstance(x, int) else tether.default_serialise_filter_spec(f, x)
        >>> tether.tree_serialise_leaves("floats.eqx", [1.0, 2, 3.0], spec)
    """
    _check_no_variable(_SAVE, x)
    if isinstance(x, jax.ShapeDtypeStruct):
        raise ArgumentError(
            f"{_SAVE}: a leaf has no numbers, only a shape.",
            got=f"{describe(x)} of eval_shape",
            expected="arrays",
            fix="make the model, and save that",
        )
    if isinstance(x, jax.Array) and is_key(x):
        x = jax.random.key_data(x)
    if not isinstance(x, jax.Array | np.ndarray | _NUMBERS):
        return
    array = np.asarray(x)
    if array.dtype == object:
        raise ArgumentError(
            f"{_SAVE}: NumPy has no dtype for this leaf.",
            got=describe(x),
            expected="numbers of a fixed size",
            fix="a filter_spec that leaves this leaf out",
        )
    np.lib.format.write_array(f, array, allow_pickle=False)


def default_deserialise_filter_spec(f: BinaryIO, x: Any) -> Any:
    """Reads a leaf in the place of one like it; what is neither array nor number comes back as it is.

    Args:
        f: An open binary file.
        x: A leaf like the one that was saved; a ``jax.ShapeDtypeStruct`` stands for an array.
    Raises:
        StructureError: the file has no record here.
    Example:
        >>> tether.tree_serialise_leaves("wide.eqx", np.ones(2, "float32"))
        >>> spec = lambda f, x: tether.default_deserialise_filter_spec(f, x).astype(x.dtype)
        >>> tether.tree_deserialise_leaves("wide.eqx", jnp.ones(2, "bfloat16"), spec).dtype
        dtype(bfloat16)
    """
    _check_no_variable(_LOAD, x)
    if isinstance(x, jax.Array | jax.ShapeDtypeStruct):
        if is_key(x):
            return _keys(read_record(f), x)
        array = _of_dtype(read_record(f), x.dtype)
        new = jnp.asarray(array)
        return new if new.dtype == array.dtype else array  # float64, say: JAX would round it
    if isinstance(x, np.ndarray):
        return _of_dtype(read_record(f), x.dtype)
    if isinstance(x, np.generic):
        return _of_dtype(read_record(f), x.dtype)[()]
    if isinstance(x, _NUMBERS):
        array = read_record(f)
        return array if array.ndim else array.item()
    return x


def _check_no_variable(name: str, x: Any) -> None:
    if isinstance(x, Variable | Cells):
        raise ArgumentError(
            f"{name}: a Variable lies in the tree by itself.",
            got=f"a {type(x).__name__}" if isinstance(x, Variable) else "the Variables of a pytree",
            expected="a module, which is written by value; or an array",
            fix=["give its .value", "hold it in a module"],
        )


def read_record(f: BinaryIO) -> np.ndarray:
    """The next array in a file."""
    try:
        return np.lib.format.read_array(f, allow_pickle=False)
    except ValueError as error:
        is_over = not f.read(1)
        raise StructureError(
            f"{_LOAD}: the file ends before the last leaf." if is_over else f"{_LOAD}: this is no file of leaves.",
            got=f"{'the end of the file' if is_over else 'other bytes'} ({error})",
            expected="an .npy record for each leaf, as tree_serialise_leaves writes it",
            fix="a tree of the structure that was saved, and a file that was written to its end" if is_over else None,
        ) from error


def _of_dtype(array: np.ndarray, dtype: Any) -> np.ndarray:
    """The array, if NumPy wrote no more of its dtype than the size, as it does of bfloat16."""
    is_foreign = np.dtype(dtype).isbuiltin != 1 and array.dtype.kind == "V" and array.dtype.itemsize == dtype.itemsize
    return array.view(dtype) if is_foreign else array


def _keys(data: np.ndarray, like: Any) -> Any:
    like = like if isinstance(like, jax.Array) else jnp.empty(like.shape, like.dtype)
    old = jax.random.key_data(like)
    if (data.shape, data.dtype) != (old.shape, old.dtype):
        return data
    return jax.random.wrap_key_data(jnp.asarray(data), impl=jax.random.key_impl(like))


def tree_serialise_leaves(
    path_or_file: str | os.PathLike[str] | BinaryIO,
    pytree: Any,
    filter_spec: Any = default_serialise_filter_spec,
    is_leaf: Callable[[Any], bool] | None = None,
) -> None:
    """Writes the leaves of a tree to a file, those of a module with the values that its Variables have now.

    Under a path the file appears whole: whatever happens, there is the old one or the new one.

    Args:
        path_or_file: A path, which gets the suffix ``.eqx`` if it has none; or an open binary file.
        pytree: Any tree.
        filter_spec: Function of the file and a leaf that writes it or leaves it out; or a tree of such functions that
            is a prefix of ``pytree``.
        is_leaf: What counts as a leaf, as in ``jax.tree.map``.
    Raises:
        ArgumentError: a leaf that can't be written, or no path and no file.
        StructureError: ``filter_spec`` is no prefix of ``pytree``.
    Example:
        >>> model = nn.Linear(2, 3)
        >>> tether.tree_serialise_leaves("model.eqx", model)
        >>> model = tether.tree_deserialise_leaves("model.eqx", nn.Linear(2, 3))
    """
    leaves, _ = _paired(_SAVE, filter_spec, pytree, is_leaf)
    with _whole(path_or_file) if _is_path(path_or_file) else _given(_SAVE, path_or_file, "write") as file:
        for spec, leaf, place in leaves:
            with _placed(place):
                spec(file, leaf)


def tree_deserialise_leaves(
    path_or_file: str | os.PathLike[str] | BinaryIO,
    like: Any,
    filter_spec: Any = default_deserialise_filter_spec,
    is_leaf: Callable[[Any], bool] | None = None,
) -> Any:
    """A tree with leaves from a file.

    By value: ``like`` stays as it is, and ``tether.update(model, loaded)`` brings it into a model. Of an open file as
    much is read as ``like`` has leaves.

    Args:
        path_or_file: A path, which gets the suffix ``.eqx`` if it has none; or an open binary file.
        like: A tree of the structure that was saved, with leaves of the same types, shapes and dtypes:
            ``tether.eval_shape(Model)`` too, which takes no memory.
        filter_spec: Function of the file and a leaf of ``like`` that reads the new leaf, or gives back the old; or a
            tree of such functions that is a prefix of ``like``.
        is_leaf: What counts as a leaf, as in ``jax.tree.map``.
    Raises:
        StructureError: the file has fewer leaves or more, or one of another type, shape or dtype.
        ArgumentError: no path and no file.
    Example:
        >>> tether.tree_serialise_leaves("numbers.eqx", {"a": jnp.ones(2), "b": 1})
        >>> tether.tree_deserialise_leaves("numbers.eqx", {"a": jnp.zeros(2), "b": 0})
        {'a': Array([1., 1.], dtype=float32), 'b': 1}
    """
    leaves, build = _paired(_LOAD, filter_spec, like, is_leaf)
    news = []
    with (
        open(with_suffix(path_or_file), "rb") if _is_path(path_or_file) else _given(_LOAD, path_or_file, "read") as file
    ):
        for spec, old, place in leaves:
            with _placed(place):
                news.append(_fitting(spec(file, old), old))
        if _is_path(path_or_file):
            _check_at_end(file)
    return build(news)


def _check_at_end(file: Any) -> None:
    read, size = file.tell(), os.fstat(file.fileno()).st_size
    if read < size:
        raise StructureError(
            f"{_LOAD}: the file goes on after the last leaf.",
            at=str(file.name),
            got=f"{read} of {size} bytes are those of the leaves",
            expected="a tree of the structure that was saved",
            fix="an open file in place of the path, if only the first leaves are wanted",
        )


def _paired(name: str, filter_spec: Any, tree: Any, is_leaf: Any) -> tuple[list[tuple[Any, Any, str]], Any]:
    """For each leaf its spec, itself and its path; and what makes a tree of new leaves."""
    specs, treedef = jax.tree_util.tree_flatten_with_path(filter_spec)
    try:
        parts = treedef.flatten_up_to(tree)
    except ValueError as error:
        what = f"{name}: filter_spec is not a prefix of the tree."
        raise structure_error(what, "tree", filter_spec, tree, fix="one function for all leaves") from error
    rows, kinds = [], []
    for (path, spec), part in zip(specs, parts, strict=True):
        if not callable(spec):
            raise StructureError(
                f"{name}: a leaf of filter_spec is no function.",
                at=f"filter_spec{jax.tree_util.keystr(path)}",
                got=describe(spec),
                expected="a function of the file and a leaf",
                fix=f"lambda f, x: {'x' if name == _LOAD else None}, for leaves that are not in the file",
            )
        leaves, kind = jax.tree_util.tree_flatten_with_path(part, is_leaf=is_leaf)
        rows += [(spec, leaf, f"tree{jax.tree_util.keystr((*path, *place))}") for place, leaf in leaves]
        kinds.append(kind)

    def build(news: list[Any]) -> Any:
        rest = iter(news)
        return treedef.unflatten([kind.unflatten(itertools.islice(rest, kind.num_leaves)) for kind in kinds])

    return rows, build


def _fitting(new: Any, old: Any) -> Any:
    """A leaf for the place of the old one."""
    alike = not hasattr(old, "dtype") or _form(new) == _form(old)
    if alike and _type(new) is _type(old):
        return new
    if alike and _type(old) is jax.Array and isinstance(new, np.ndarray):
        return jnp.asarray(new)
    got, expected = (describe(x) if hasattr(x, "dtype") else type(x).__qualname__ for x in (new, old))
    if got == expected:
        got, expected = (
            f"{text} ({_type(x).__name__.rpartition('.')[2]})" for text, x in ((got, new), (expected, old))
        )
    raise StructureError(
        f"{_LOAD}: the file has another leaf here.",
        got=got,
        expected=expected,
        fix="a tree of the structure that was saved, or a filter_spec that converts",
    )


def _form(leaf: Any) -> Any:
    return getattr(leaf, "shape", None), getattr(leaf, "dtype", None)


def _type(leaf: Any) -> type:
    return jax.Array if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) else type(leaf)


@contextlib.contextmanager
def _placed(place: str) -> Iterator[None]:
    """Says of an error at which leaf it was."""
    try:
        yield
    except TetherError as error:
        error.at = error.at or place
        raise
    except Exception as error:
        error.add_note(f"at the leaf {place}")
        raise


def _is_path(path_or_file: Any) -> TypeGuard[str | os.PathLike[str]]:
    return isinstance(path_or_file, str | os.PathLike)


def with_suffix(path: str | os.PathLike[str]) -> Path:
    """The path of a file of leaves."""
    path = Path(path)
    return path if path.suffix else path.with_suffix(".eqx")


@contextlib.contextmanager
def _given(name: str, file: Any, method: str) -> Iterator[Any]:
    """A file that the user has opened, and closes."""
    if not hasattr(file, method):
        raise ArgumentError(
            f"{name}: this is neither a path nor an open file.",
            got=describe(file),
            expected="a str, a path, or a binary file",
            fix=f"{name}(path, tree)",
        )
    yield file


@contextlib.contextmanager
def _whole(path: Any) -> Iterator[BinaryIO]:
    """A file that takes its name when it is written to its end."""
    final = os.path.realpath(with_suffix(path))  # a link stays a link
    unfinished = f"{final}.{secrets.token_hex(4)}.tmp"
    try:
        with open(unfinished, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, final)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.remove(unfinished)
        raise
