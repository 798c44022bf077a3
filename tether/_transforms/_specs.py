# SPDX-License-Identifier: Apache-2.0
"""PartitionSpecs: which they are for each part of a tree, whether they fit, and how an array lies on a mesh already."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from tether._core import frame as _frame
from tether._core import ref as _ref
from tether._core import trace as _trace
from tether._core.variable import Cells, Variable
from tether._modules.module import Module, structure_of, variables_of
from tether._modules.selection import matches
from tether._transforms._call import is_stateful
from tether.errors import ArgumentError, ShapeError, describe

INFER: Any = inspect.signature(jax.shard_map).parameters["in_specs"].default
_LEAF = jax.tree.structure(0)


class Grid:
    """The mesh of one call: the axes over which the function is mapped, and their sizes."""

    def __init__(self, mesh: Any, axis_names: Any, checks: bool):
        self.mesh, self.checks = jax.sharding.get_abstract_mesh() if mesh is None else mesh, checks
        if not isinstance(self.mesh, Mesh | AbstractMesh) or self.mesh.empty:
            raise ArgumentError(
                "shard_map: there is no mesh.",
                got=f"mesh={describe(mesh)}" + (", and none in the context" if mesh is None else ""),
                expected="a jax.sharding.Mesh",
                fix=["mesh=jax.sharding.Mesh(jax.devices(), 'devices')", "with jax.set_mesh(mesh): ..."],
            )
        names = self.mesh.axis_names
        if not set(axis_names) <= set(names):
            raise ArgumentError(
                "shard_map: axis_names has an axis that the mesh doesn't have.",
                got=f"axis_names={sorted(map(str, axis_names))}",
                expected=in_words(names),
            )
        self.types = dict(zip(names, self.mesh.axis_types, strict=True))
        here = [name for name in names if name in (axis_names or names)]
        self.axes = tuple(name for name in here if self.types[name] != AxisType.Manual)
        self.sizes = dict(self.mesh.shape)

    def is_explicit(self) -> bool:
        return all(self.types[name] == AxisType.Explicit for name in self.axes)

    def check(self, spec: Any, name: str) -> Any:
        """The PartitionSpec, if it is one of these axes."""
        if not isinstance(spec, PartitionSpec):
            raise ArgumentError(
                "shard_map: this is no PartitionSpec.",
                at=name,
                got=describe(spec),
                expected="a jax.sharding.PartitionSpec",
                fix="jax.sharding.PartitionSpec() where all shards have all of it",
            )
        unknown = [axis for axis in axes_of(spec) if axis not in self.axes]
        if unknown:
            raise ArgumentError(
                "shard_map: a PartitionSpec names an axis that the function isn't mapped over.",
                at=name,
                got=f"{spec}, with {unknown[0]!r}",
                expected=in_words(self.axes),
                fix="an axis of mesh=, and of axis_names= if those are given",
            )
        return spec

    def check_fit(self, spec: PartitionSpec, value: Any, name: str) -> None:
        """Checks that a value can be split so."""
        shape, entries = jnp.shape(value), list(spec)
        if len(entries) > len(shape):
            raise ShapeError(
                "shard_map: a PartitionSpec has more entries than the array has axes.",
                at=name,
                got=f"{_array(value)} and {spec}",
                expected=f"at most {len(shape)} entries",
                fix="jax.sharding.PartitionSpec() where all shards have all of it",
            )
        for place, entry in enumerate(entries):
            axes = axes_of([entry])
            size = self.size_of(axes)
            if shape[place] % size:
                raise ShapeError(
                    "shard_map: the mesh doesn't divide an axis of an array.",
                    at=name,
                    got=f"{_array(value)}, whose axis {place} is {shape[place]}, and {spec}",
                    expected=f"a multiple of {size}, the size of {in_words(axes)}",
                    fix=["an array that is padded, or of another size", "another PartitionSpec"],
                )

    def check_devices(self, value: Any, name: str) -> None:
        """Checks that a concrete array can be brought to the mesh: not if it was put on other devices."""
        if not isinstance(value, jax.Array) or _trace.owner(value) is not None or not value.committed:
            return
        if isinstance(self.mesh, Mesh) and value.sharding.device_set != set(self.mesh.devices.flat):
            raise ArgumentError(
                "shard_map: an array was put on other devices than those of the mesh.",
                at=name,
                got=f"{describe(value)} on {', '.join(sorted(map(str, value.sharding.device_set)))}",
                expected=f"the {self.mesh.size} devices of the mesh, or an array that was put nowhere",
                fix=[
                    "tether.place(model, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))",
                    "jax.device_put of an argument, likewise",
                ],
            )

    def size_of(self, axes: Iterable[Any]) -> int:
        return math.prod(self.sizes[axis] for axis in axes)

    def own_spec(self, variable: Variable, value: Any) -> PartitionSpec:
        """How the value that the Variable has now lies on this mesh."""
        if self.is_explicit():
            return self.inferred(value)
        held = _frame.held(variable)  # inside a jit, the array that the tracer stands for
        return self._layout(held) if getattr(held, "shape", None) == value.shape else PartitionSpec()

    def inferred(self, value: Any) -> PartitionSpec:
        """How an array lies on the explicit axes of this mesh, as its type says."""
        return self._layout(jax.typeof(value)) if self.is_explicit() else PartitionSpec()

    def _layout(self, value: Any) -> PartitionSpec:
        sharding = getattr(value, "sharding", None)
        if not isinstance(sharding, NamedSharding) or not self._is_mesh(sharding.mesh):
            return PartitionSpec()
        entries = [tuple(axis for axis in axes_of([entry]) if axis in self.axes) for entry in sharding.spec]
        while entries and not entries[-1]:
            del entries[-1]
        return PartitionSpec(*[(entry[0] if len(entry) == 1 else entry) or None for entry in entries])

    def _is_mesh(self, mesh: Any) -> bool:
        if (
            isinstance(mesh, Mesh)
            and isinstance(self.mesh, Mesh)
            and not np.array_equal(mesh.devices, self.mesh.devices)
        ):
            return False
        return dict(mesh.shape) == self.sizes

    def placed(self, variable: Variable, spec: PartitionSpec) -> Any:
        """The value of a Variable, laid out as its spec says, where explicit axes or the device of a Ref ask for it."""
        value = _frame.peek(variable)
        if _ref.holds(variable) and _trace.owner(value) is None and isinstance(self.mesh, Mesh):
            return jax.device_put(value, NamedSharding(self.mesh, spec))
        if self.is_explicit() and self.own_spec(variable, value) != spec:
            return jax.sharding.reshard(value, NamedSharding(self.mesh, spec))
        return value

    def differing(self, value: Any, spec: PartitionSpec, is_ruled: bool) -> tuple[Any, ...]:
        """The axes along which the shards that share this part of an array have other values of it."""
        axes = varying(value) if self.checks else frozenset(self.axes if is_ruled else ())
        return tuple(axis for axis in self.axes if axis in axes and axis not in axes_of(spec))


def spread(
    specs: Any, tree: Any, name: str, option: str, is_leaf: Callable[[Any], bool] = is_stateful
) -> Iterator[tuple[str, Any, Any]]:
    """Each leaf of a tree, modules being leaves, with its name and its part of a prefix tree of specs."""
    is_whole = isinstance(specs, PartitionSpec) or specs is INFER or (specs is None and option == "in_specs")
    if is_whole or is_leaf(tree):
        for path, part in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)[0]:
            yield name + jax.tree_util.keystr(path), part, specs
        return
    parts, kind = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda part: part is not tree)
    inner, spec_kind = jax.tree.flatten(specs, is_leaf=lambda part: part is not specs)
    if kind != spec_kind or kind == _LEAF:
        raise ArgumentError(
            f"shard_map: {option} is no prefix of what it is for.",
            at=name,
            got=f"{_form(specs, spec_kind)} for {_form(tree, kind)}",
            expected="a PartitionSpec" if kind == _LEAF else f"a PartitionSpec, or {_form(tree, kind)} of those",
        )
    for (path, part), spec in zip(parts, inner, strict=True):
        yield from spread(spec, part, name + jax.tree_util.keystr(path), option, is_leaf)


def variable_specs(spec: Any, part: Any, name: str, grid: Grid) -> dict[Variable, PartitionSpec]:
    """The specs that are declared for the Variables of one module, or for loose ones."""
    named: dict[Variable, Any] = {}
    if isinstance(spec, PartitionSpec):
        loose = part.variables if isinstance(part, Cells) else (part,)
        named = dict.fromkeys(variables_of(part) if isinstance(part, Module) else loose, spec)
    elif isinstance(part, Module) and isinstance(spec, dict):
        named = {variable: one for select, one in reversed(spec.items()) for variable in matches(select, part)}
    elif isinstance(part, Module) and isinstance(spec, Module) and structure_of(spec) == structure_of(part):
        pairs = zip(variables_of(part), map(_frame.peek, variables_of(spec)), strict=True)
        named = {variable: one for variable, one in pairs if one is not None}
    elif spec is not None and spec is not INFER:
        raise ArgumentError(
            "shard_map: this doesn't say how a module is split.",
            at=f"{name}  ({type(part).__name__})",
            got=describe(spec),
            expected="a PartitionSpec for all its Variables, or {select: PartitionSpec}, or None",
            fix="{tether.Param: jax.sharding.PartitionSpec()}, for example",
        )
    return {variable: grid.check(one, f"the specs of {name}") for variable, one in named.items()}


def specs_in(tree: Any) -> list[Any]:
    """The PartitionSpecs in a tree of specs, those of selections too."""
    if isinstance(tree, dict):
        return [spec for part in tree.values() for spec in specs_in(part)]
    if isinstance(tree, PartitionSpec):
        return [tree]
    parts = jax.tree.leaves(tree, is_leaf=lambda part: part is not tree)
    return [spec for part in parts if part is not tree for spec in specs_in(part)]


def varying(value: Any) -> frozenset[Any]:
    """The axes of the mesh along which a value is known to differ, inside a shard_map that checks."""
    aval = jax.typeof(value)
    manual = getattr(aval, "manual_axis_type", None)
    return frozenset(aval.vma if manual is None else manual.varying)


def axes_of(spec: Iterable[Any]) -> tuple[Any, ...]:
    """The names of the mesh's axes in a PartitionSpec, or in some of its entries."""
    return tuple(
        name for entry in spec if entry is not None for name in (entry if isinstance(entry, tuple) else (entry,))
    )


def _form(tree: Any, kind: Any) -> str:
    """The outermost node of a tree, as in ``{'a': *, 'b': *}``."""
    return describe(tree) if kind == _LEAF else str(kind).removeprefix("PyTreeDef(").removesuffix(")")


def in_words(axes: Iterable[Any]) -> str:
    names = list(axes)
    return f"{'axis' if len(names) == 1 else 'axes'} {', '.join(map(repr, names))}"


def _array(value: Any) -> str:
    return describe(value if hasattr(value, "dtype") else jnp.asarray(value))
