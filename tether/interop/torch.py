# SPDX-License-Identifier: Apache-2.0
"""Weights from and to PyTorch: a state_dict in memory, or a .safetensors file. No file is ever unpickled.

Names need no rules where a model is built as its twin is: ``layer1[0].bn1.mean`` finds ``layer1.0.bn1.running_mean``.
"""

from __future__ import annotations

import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from tether._core import Variable
from tether._core import frame as _frame
from tether._modules import Module, matches
from tether._modules.module import structure_of, variables_of
from tether.errors import DtypeError, describe
from tether.interop._arrays import tensors, torch_tensor, write_file
from tether.interop._fit import Fit
from tether.interop._names import links
from tether.interop._rules import Rules, Transforms, renamed, transformer
from tether.tree import Report, update

__all__ = ["load", "save", "state_dict"]


def load(
    model: Module,
    source: Any,
    *,
    rules: Rules | None = None,
    transforms: Transforms | None = None,
    select: Any = Variable,
    strict: bool = True,
) -> Report:
    r"""Writes the tensors of a PyTorch model into a model, in place: all of them, or none if one doesn't fit.

    A tensor is cast to the floating dtype of its cell, and placed where the cell is, on its sharding. Running
    statistics are found under PyTorch's names, and ``num_batches_tracked`` is passed over where nothing counts
    batches. A cell that is tied needs a tensor under one of its names; under several, they must be equal.

    Args:
        model: The model; its cells may be jax.ShapeDtypeStructs, from ``tether.eval_shape`` of a constructor.
        source: A path of a .safetensors file or a list of those, a torch.nn.Module, or a mapping from names to
            tensors or arrays.
        rules: {regular expression: replacement}, for tensors under other names: each in turn is replaced wherever it
            is found in a name. None for a replacement leaves the tensor out.
        transforms: {regular expression: function of an array}, for tensors in another layout, by the names in the
            source: ``{r"c_attn.weight$": np.transpose}``.
        select: The cells to load; tensors of others are passed over.
        strict: Whether a missing or unexpected tensor raises; else it is reported. One of another shape always raises.
    Returns:
        The paths that were written, the names of tensors that were missing, and of those nobody expected.
    Raises:
        StructureError: tensors that are missing, unexpected, of another shape or kind, or tied and not equal: all that
            there are, in one error.
        ArgumentError: a source of no known form, a pickled file, rules that give two tensors one name.
    Example:
        >>> layer = nn.Linear(2, 3)
        >>> there = {"net.0.weight": np.ones((3, 2)), "net.0.bias": np.zeros(3)}
        >>> tether.interop.torch.load(layer, there, rules={r"^net\.0\.": ""}).updated
        ('weight', 'bias')
    """
    user = "interop.torch.load"
    parts, given = links(model), tensors(source, user)
    names, transform = renamed(given, rules or {}, user), transformer(transforms or {}, user)
    arrays = {new: transform(old, given[old]()) for old, new in names.items()}
    fit = Fit(parts, arrays, set(matches(select, model)))
    if fit.faults(strict):
        raise fit.error(strict, os.fspath(source) if isinstance(source, str | os.PathLike) else None, user)
    paths = dict(zip(variables_of(model), structure_of(model).paths, strict=True))
    values = {paths[variable]: _placed(variable, value) for variable, value in fit.values.items()}
    update(model, values)
    return Report(tuple(values), tuple(fit.missing), tuple(fit.unexpected))


def _placed(variable: Variable, value: np.ndarray) -> jax.Array:
    """The value as an array where the cell's is: a sharded one never lies whole on one device."""
    held = _frame.peek(variable)
    sharding = None if isinstance(held, Tracer) else getattr(held, "sharding", None)
    if sharding is not None and getattr(held, "committed", True):
        return jax.device_put(value, sharding)
    return jnp.asarray(value)


def state_dict(
    model: Module,
    *,
    rules: Rules | None = None,
    transforms: Transforms | None = None,
    select: Any = Variable,
    as_torch: bool = False,
) -> dict[str, Any]:
    """The arrays of a model under PyTorch's names and in its layout, for ``twin.load_state_dict``.

    A tied cell stands under each of its names. Streams of random keys are left out; ``num_batches_tracked`` is too
    where nothing counts batches, and PyTorch then puts its own there.

    Args:
        model: The model.
        rules: {regular expression: replacement}, applied to PyTorch's names; None leaves one out.
        transforms: {regular expression: function of an array}, by the names that come out.
        select: The cells that are wanted; a tensor made of several needs all of them.
        as_torch: Whether to give torch tensors; else NumPy arrays, bfloat16 among them.
    Raises:
        ArgumentError: rules that give two tensors one name; torch is not installed.
    Example:
        >>> list(tether.interop.torch.state_dict(nn.Sequential([nn.Linear(2, 3), nn.BatchNorm(3)])))
        ['0.weight', '0.bias', '1.weight', '1.bias', '1.running_mean', '1.running_var']
    """
    user = "interop.torch.state_dict"
    parts, chosen = links(model), set(matches(select, model))
    parts = [link for link in parts if chosen.issuperset(link.variables) and not link.alternative]
    variables = list(dict.fromkeys(variable for link in parts for variable in link.variables))
    held = dict(zip(variables, map(_held, variables, _frame.gather(variables)), strict=True))
    arrays = {}
    for link in parts:
        arrays.update(zip(link.names, link.write([held[variable] for variable in link.variables]), strict=True))
    names, transform = renamed(arrays, rules or {}, user), transformer(transforms or {}, user)
    found = {new: transform(new, arrays[old]) for old, new in names.items()}
    return {name: torch_tensor(array) for name, array in found.items()} if as_torch else found


def _held(variable: Variable, value: Any) -> np.ndarray:
    if isinstance(value, Tracer) or not isinstance(value, jax.Array):
        raise DtypeError(
            "interop.torch.state_dict: a cell holds no array.",
            at=variable.describe(),
            got=f"a traced {describe(value)}" if isinstance(value, Tracer) else type(value).__name__,
            expected="a model with its values",
            fix="outside of transformations, and after the model has been filled: load(model, source)",
        )
    return np.asarray(value)


def save(
    model: Module,
    path: str | os.PathLike[str],
    *,
    rules: Rules | None = None,
    transforms: Transforms | None = None,
    select: Any = Variable,
) -> None:
    """Writes ``state_dict(model)`` to a .safetensors file, for PyTorch or for ``load``; it needs safetensors.

    Args:
        model: The model.
        path: Of the file; one that is there is replaced when the new one is whole.
        rules, transforms, select: As in state_dict.
    Raises:
        ArgumentError: the path doesn't end in .safetensors; safetensors is not installed.
    """
    arrays = state_dict(model, rules=rules, transforms=transforms, select=select)
    write_file(path, arrays, "interop.torch.save")
