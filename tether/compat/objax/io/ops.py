# SPDX-License-Identifier: Apache-2.0
"""Saves and loads the values of variables.

| Objax | here | what differs |
| --- | --- | --- |
| save_var_collection | the same bytes | the old file stays if the new one can't be written; bfloat16 comes back |
| load_var_collection | the same files | nothing is assigned before all is found to fit |

A file is an npz without compression: ``names``, an array of text, and ``0``, ``1`` ..., the value for each name.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tether.compat.objax._check import assert_assigned_type_and_shape_match
from tether.compat.objax._errors import ConflictError, MisuseError
from tether.compat.objax.typing import FileOrStr
from tether.compat.objax.variable import BaseVar, TrainRef, VarCollection
from tether.errors import describe

__all__ = ["load_var_collection", "save_var_collection"]


class _Stream:
    """An open file without ``seek``: zipfile then writes from front to back, to a pipe as well."""

    def __init__(self, file: Any):
        self._file = file
        self.read = getattr(file, "read", None)  # by it NumPy knows a file

    def write(self, data: Any) -> int:
        return self._file.write(data)

    def tell(self) -> int:
        return self._file.tell()

    def flush(self) -> None:
        self._file.flush()


def save_var_collection(file: FileOrStr, vc: VarCollection) -> None:
    """Saves the values of variables, each once, under its first name.

    Args:
        file: A name, or an open binary file, which needs no ``seek``.
        vc: The variables.
    Raises:
        ConflictError: a value is no array.
    """
    data: dict[str, np.ndarray] = {}
    names: list[str] = []
    for name, variable in _named(vc).values():
        names.append(name[0])
        data[str(len(data))] = _as_numpy(name[0], variable.value)
    if not isinstance(file, str | os.PathLike):
        _write(file, names, data)
        return
    unfinished = f"{os.fspath(file)}.tmp"  # so that a name never stands for half a file
    try:
        with open(unfinished, "wb") as stream:
            _write(stream, names, data)
        os.replace(unfinished, file)
    except BaseException:
        with contextlib.suppress(OSError):
            os.remove(unfinished)
        raise


def _write(file: Any, names: list[str], data: dict[str, Any]) -> None:
    stream: Any = _Stream(file)
    np.savez(stream, names=np.array(names), **data)


def _as_numpy(name: str, value: Any) -> np.ndarray:
    array = np.asarray(value)
    if array.dtype == object:
        raise ConflictError(
            "save_var_collection: this variable holds no array.",
            at=name,
            got=describe(value),
            expected="an array, or a number",
        )
    return array


def _named(vc: VarCollection) -> dict[int, tuple[list[str], BaseVar]]:
    """Each variable once, with all of its names."""
    found: dict[int, tuple[list[str], BaseVar]] = {}
    for name, variable in vc.items():
        variable = variable.ref if isinstance(variable, TrainRef) else variable
        found.setdefault(id(variable), ([], variable))[0].append(name)
    return found


def load_var_collection(file: FileOrStr, vc: VarCollection, renamer: Callable[[str], str] | None = None) -> None:
    """Loads the values of variables; what else is in the file is ignored.

    Args:
        file: A name, or an open binary file.
        vc: The variables.
        renamer: Makes names as in ``vc`` from those in the file.
    Raises:
        ConflictError: it is no such file, or a variable isn't in it under any of its names.
        MisuseError: a value has another shape than its variable.
    """
    with contextlib.ExitStack() as stack:
        stream: Any = stack.enter_context(open(file, "rb")) if isinstance(file, str | os.PathLike) else file
        data = np.load(stream, allow_pickle=False)
        if not isinstance(data, np.lib.npyio.NpzFile) or "names" not in data:
            raise ConflictError(
                "load_var_collection: this is no file of variables.",
                got=", ".join(data) if isinstance(data, np.lib.npyio.NpzFile) else describe(data),
                expected="an npz file of names, 0, 1 ..., as save_var_collection writes it",
            )
        saved = {(renamer or str)(str(name)): str(place) for place, name in enumerate(data["names"])}
        found = _found(vc, saved, data)
    for variable, value in found:
        variable.assign(value)


def _found(vc: VarCollection, saved: dict[str, str], data: Any) -> list[tuple[BaseVar, jax.Array]]:
    """The variables with their values in the file."""
    found, used, missing = [], set(), []
    for names, variable in _named(vc).values():
        name = next((name for name in names if name in saved), None)
        if name is None:
            missing += names
            continue
        used.add(name)
        found.append((variable, _fitting(name, variable.value, data[saved[name]])))
    if missing:
        unused = sorted(saved.keys() - used)
        raise ConflictError(
            f"Missing value for variables currently in the model: {missing}.",
            got=f"a file whose other values were not used: {unused}",
            expected="a value for each variable, under one of its names",
            fix="renamer=objax.util.Renamer({name in the file: name in the model})" if unused else None,
        )
    return found


def _fitting(name: str, old: Any, array: np.ndarray) -> jax.Array:
    """What is assigned to a variable."""
    if array.dtype.kind == "V" and array.dtype.itemsize == old.dtype.itemsize:
        array = array.view(old.dtype)  # NumPy doesn't write the names of dtypes that it doesn't have
    new = jnp.array(array)
    try:
        assert_assigned_type_and_shape_match(old, new)
    except MisuseError as error:
        raise MisuseError(
            f"Error when restoring variable {name}: {error.what}",
            at=name,
            got=f"{describe(new)} in the file",
            expected=describe(old),
        ) from None
    return new
