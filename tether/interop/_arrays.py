# SPDX-License-Identifier: Apache-2.0
"""NumPy arrays of what PyTorch holds, in memory or in a file, and back. No file is ever unpickled."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tether._modules import Module
from tether.errors import ArgumentError, DtypeError, describe
from tether.interop._packages import package
from tether.interop._rules import exactly

_PICKLED = ("pt", "pth", "bin", "ckpt", "pkl", "pickle", "tar")
# What PyTorch and NumPy call alike but NumPy has only by ml_dtypes; it crosses as integers of the same width.
_NARROW = {
    name: np.dtype(getattr(jnp, name)) for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2") if hasattr(jnp, name)
}

Tensors = Mapping[str, Callable[[], Any]]


def tensors(source: Any, user: str) -> Tensors:
    """The tensors of a source by name, each behind a function, so that those nobody wants are not copied.

    Raises:
        ArgumentError: the source is of no known form, or a file that would have to be unpickled.
    """
    if isinstance(source, str | os.PathLike):
        return _of_files([Path(source)], user)
    if isinstance(source, list | tuple) and source and all(isinstance(part, str | os.PathLike) for part in source):
        return _of_files([Path(part) for part in source], user)
    get = getattr(source, "state_dict", None)
    if callable(get) and not isinstance(source, type | Module):
        source = get()
    if not isinstance(source, Mapping):
        raise _no_source(source, user)
    if not source or not all(isinstance(name, str) for name in source):
        raise _no_names(source, user)
    return {name: lambda name=name, value=value: _numpy(name, value, user) for name, value in source.items()}


def _no_source(source: Any, user: str) -> ArgumentError:
    fix = ["the path of a .safetensors file", "a torch.nn.Module, or its state_dict()"]
    if isinstance(source, Module):
        fix = ["tether.update(model, other), from a model of Tether", *fix]
    if isinstance(source, type):
        fix = [f"make one: {source.__name__}(...)", *fix]
    return ArgumentError(
        f"{user}: the source holds no tensors by name.",
        got=describe(source),
        expected="a path, a torch.nn.Module, or a mapping from names to tensors",
        fix=fix,
    )


def _no_names(source: Mapping[Any, Any], user: str) -> ArgumentError:
    other = next((key for key in source if not isinstance(key, str)), None)
    return ArgumentError(
        f"{user}: the source is no mapping from names to tensors.",
        got="an empty mapping" if not source else f"a key that is {describe(other)}",
        expected="{'layer.weight': tensor}",
        fix="torch_module.state_dict()",
    )


def _numpy(name: str, value: Any, user: str) -> np.ndarray:
    """A tensor, or an array, as a NumPy array of the same dtype."""
    if hasattr(value, "detach") and hasattr(value, "cpu"):
        return _of_torch(value.detach().cpu())
    if not isinstance(value, np.ndarray | np.generic | jax.Array | float | int):
        inner = isinstance(value, Mapping)
        raise ArgumentError(
            f"{user}: what stands under a name is no tensor.",
            at=repr(name),
            got=describe(value),
            expected="a tensor or an array",
            fix=f"give source[{name!r}] alone" if inner else f"leave it out: rules={{{exactly(name)!r}: None}}",
        )
    return np.asarray(value)


def _of_torch(tensor: Any) -> np.ndarray:
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in _NARROW:
        return tensor.resolve_conj().resolve_neg().numpy()
    torch = package("torch", "interop.torch")
    carrier = {1: torch.uint8, 2: torch.int16}[_NARROW[dtype].itemsize]
    return tensor.contiguous().view(carrier).numpy().view(_NARROW[dtype])


def torch_tensor(array: np.ndarray) -> Any:
    """A torch tensor with memory of its own."""
    torch = package("torch", "interop.torch.state_dict")
    if array.dtype.name not in _NARROW:
        return torch.from_numpy(array.copy())
    carrier = {1: np.uint8, 2: np.int16}[array.dtype.itemsize]
    return torch.from_numpy(array.view(carrier).copy()).view(getattr(torch, array.dtype.name))


def _of_files(paths: list[Path], user: str) -> Tensors:
    found: dict[str, Callable[[], Any]] = {}
    for path in paths:
        if path.suffix != ".safetensors":
            raise _other_file(path, user)
        for name, get in _of_file(path, user):
            if name in found:
                raise ArgumentError(
                    f"{user}: a tensor is in two of the files.",
                    at=repr(name),
                    got=f"{name!r} in {path.name} and in one before it",
                    expected="files that together are one checkpoint",
                    fix="give each file once",
                )
            found[name] = get
    return found


def _of_file(path: Path, user: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    """The tensors of a file, and under their other names those that safetensors wrote once for a tie."""
    safetensors = package("safetensors", user)
    try:
        file = safetensors.safe_open(path, framework="np")
    except safetensors.SafetensorError as error:
        raise ArgumentError(
            f"{user}: this is no whole safetensors file.",
            at=str(path),
            got=str(error),
            expected="a file that safetensors wrote",
            fix="a file that was only renamed has to be converted: safetensors.torch.save_file(state_dict, path)",
        ) from error
    names = set(file.keys())
    get = lambda name: lambda: _from_file(file, name, path, user)
    yield from ((name, get(name)) for name in sorted(names))
    kept = (file.metadata() or {}).items()
    yield from ((name, get(other)) for name, other in kept if name not in names and other in names)


def _from_file(file: Any, name: str, path: Path, user: str) -> np.ndarray:
    try:
        return file.get_tensor(name)
    except (AttributeError, TypeError) as error:  # safetensors asks NumPy for a dtype that NumPy lacks
        raise DtypeError(
            f"{user}: NumPy lacks the dtype of a tensor.",
            at=f"{name!r} in {path}",
            got=file.get_slice(name).get_dtype(),
            expected="a dtype of NumPy, or bfloat16",
            fix="convert the file, where PyTorch is: {n: x.to(torch.bfloat16) for n, x in tensors.items()}",
        ) from error


def _other_file(path: Path, user: str) -> ArgumentError:
    if path.suffix.removeprefix(".").lower() not in _PICKLED:
        return ArgumentError(
            f"{user}: this is no .safetensors file by its name.",
            at=str(path),
            got=f"the suffix {path.suffix!r}",
            expected="a path that ends in .safetensors",
            fix="arrays of another format as a mapping: load(model, {name: array})",
        )
    new = path.with_suffix(".safetensors").name
    return ArgumentError(
        f"{user}: a pickled file is not read, because unpickling runs whatever program is in it.",
        at=str(path),
        got=f"the suffix {path.suffix!r}, under which PyTorch pickles",
        expected="a path that ends in .safetensors",
        fix=[
            "convert it, where PyTorch is: "
            f"tensors = torch.load({path.name!r}, map_location='cpu', weights_only=True); "
            f"safetensors.torch.save_file({{n: x.contiguous().clone() for n, x in tensors.items()}}, {new!r})",
            "load(model, torch_module), with a module that you have filled yourself",
        ],
    )


def write_file(path: str | os.PathLike[str], arrays: dict[str, np.ndarray], user: str) -> None:
    """Writes a .safetensors file whole, or leaves what was there."""
    path = Path(path)
    if path.suffix != ".safetensors":
        raise ArgumentError(
            f"{user}: the path doesn't end in .safetensors.",
            at=str(path),
            got=f"the suffix {path.suffix!r}",
            expected="a path that ends in .safetensors, the one format that is written",
            fix=str(path.with_suffix(".safetensors")),
        )
    numpy = package("safetensors.numpy", user)
    part = path.with_name(f"{path.name}.part{os.getpid()}")
    try:
        # safetensors reads the buffer as it lies: a transposed view would be written in the wrong order.
        numpy.save_file({n: np.ascontiguousarray(x) for n, x in arrays.items()}, part, metadata={"format": "pt"})
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
