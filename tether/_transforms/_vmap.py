# SPDX-License-Identifier: Apache-2.0
"""vmap: modules are shared between the lanes, or stacked, one member a lane."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tether._core import frame as _frame
from tether._core import trace as _trace
from tether._core.lift import Lifted
from tether._core.structure import is_module
from tether._core.variable import Rng, Variable
from tether._modules.module import Module, variables_of
from tether._modules.selection import matches
from tether._modules.views import restacked
from tether._transforms import _arguments
from tether._transforms._call import is_stateful, reach_of, resolved
from tether.errors import ArgumentError, ShapeError, StackedError, VmapWriteError, describe
from tether.random._streams import own_stream, settle

_RULES = ("mean", "sum", "stack", "discard")


def vmap(
    fun: Callable[..., Any] | None = None,
    in_axes: Any = 0,
    out_axes: Any = 0,
    axis_name: Any = None,
    axis_size: int | None = None,
    spmd_axis_name: Any = None,
    *,
    writes: dict[Any, str] | None = None,
) -> Any:
    """Maps a function over axes of its arguments.

    A module that the function comes by, in whatever way, is shared by the lanes; a stacked module that is an
    argument is mapped, one member a lane, and a module made inside comes back stacked. A shared Variable may be
    written with the same value in every lane; values that differ need a rule. Random draws differ from lane to
    lane, and the stream outside advances once.

    Args:
        fun: The function.
        in_axes: As in ``jax.vmap``. For a module, 0 asks that it is stacked, None shares it, and
            ``{select: axis}`` says it for each selection (``{State: 0, Param: None}``). Instead of an axis, a function
            of one leaf that returns it or None: ``tether.if_array(0)`` shares what is no array between the lanes.
        out_axes: As in ``jax.vmap``.
        axis_name: Name of the axis, for collectives.
        axis_size: Size of the axis, where no argument has it.
        spmd_axis_name: As in ``jax.vmap``.
        writes: Rules for writes to shared Variables that differ from lane to lane: ``{select: rule}``, a rule
            being "mean", "sum", "stack" (the Variable has the lanes in front already: each lane reads and writes
            its own row) or "discard". A Variable's own ``reduce=`` holds where no rule does.
    Returns:
        The mapped function. Keyword arguments are mapped over axis 0.
    Raises:
        VmapWriteError: a write that differs from lane to lane, without a rule.
        StackedError: ``in_axes=0`` for a module that isn't stacked.
        ShapeError: axes of different sizes.
    Example:
        >>> ensemble = tether.vmap(lambda key: nn.Linear(2, 3, key=key))(jax.random.split(jax.random.key(0), 4))
        >>> ensemble.weight.shape
        (4, 3, 2)
        >>> tether.vmap(lambda member, x: member(x), in_axes=(0, None))(ensemble, jnp.ones(2)).shape
        (4, 3)
    """
    options = {"in_axes": in_axes, "out_axes": out_axes, "axis_name": axis_name, "axis_size": axis_size}
    if fun is None:
        return functools.partial(vmap, **options, spmd_axis_name=spmd_axis_name, writes=writes)
    _arguments.checked_callable(fun, "vmap")
    for rule in (writes or {}).values():
        if rule not in _RULES:
            raise ArgumentError(
                "vmap: no such rule for writes.", got=repr(rule), expected=" or ".join(map(repr, _RULES))
            )

    @functools.wraps(fun, updated=())
    def vmap_fun(*args: Any, **kwargs: Any) -> Any:
        inputs = _Inputs(fun, args, kwargs, in_axes, writes or {}, axis_size)
        return _mapped(fun, inputs, out_axes, {"axis_name": axis_name, "spmd_axis_name": spmd_axis_name})

    return vmap_fun


def _mapped(fun: Callable[..., Any], inputs: _Inputs, out_axes: Any, options: dict[str, Any]) -> Any:
    outputs = _Outputs(inputs, out_axes, options["axis_name"])
    lifted = Lifted("vmap", lambda *args, **kwargs: outputs.checked(fun(*args, **kwargs), lifted.frame))
    lifted.refer = lambda module: inputs.originals.get(id(module), module)

    def inside(values: list[Any], leaves: list[Any], lane: Any) -> Any:
        lifted.frame.lane = lifted.frame.row = lane
        args, kwargs = inputs.rebuilt(leaves)
        return lifted.inside(dict(zip(inputs.mapped, values, strict=True)), *args, **kwargs)

    in_axes = (list(inputs.mapped.values()), inputs.axes, 0)
    compute = jax.vmap(inside, in_axes, (outputs.axes, outputs.write_axes), axis_size=inputs.size, **options)
    leaves, new = compute(_frame.gather(list(inputs.mapped)), inputs.leaves, jnp.arange(inputs.size))
    reduced = zip(lifted.written, new, outputs.rules, strict=True)
    kept = [(variable, _reduced(value, rule)) for variable, value, rule in reduced if rule != "discard"]
    lifted.written = [variable for variable, _ in kept]
    axes = iter(outputs.module_axes)
    lifted.born = lambda module: module if next(axes) is None else restacked(module, 1)
    return lifted.outside(leaves, [value for _, value in kept])


class _Inputs:
    """The arguments of one call: array leaves and stacked Variables with their axes, the rest as it is."""

    def __init__(self, fun: Any, args: Any, kwargs: Any, in_axes: Any, writes: dict[Any, str], size: int | None):
        self.writes, self._fun, self._args = writes, fun, (args, kwargs)
        self.leaves: list[Any] = []
        self.axes: list[Any] = []
        self.mapped: dict[Variable, Any] = {}
        self.originals: dict[int, Module] = {}  # the view of one member -> the stacked module
        self._sizes: dict[str, int] = {} if size is None else {"axis_size": size}
        self._parts: list[Any] = []
        for place, (arg, axes, asked) in enumerate(_per_argument(fun, args, in_axes)):
            self._add(arg, axes, asked, _arguments.name_at(fun, place))
        for name, value in kwargs.items():
            self._add(value, 0, False, name)
        self._rules = resolved("vmap", writes, reach_of(fun, args, kwargs)) if writes else {}
        for variable in [v for v, rule in self._rules.items() if rule == "stack"]:
            self._map_variable(variable, 0, variable.label)
        self.size = self._common_size(fun)

    def _add(self, arg: Any, axes: Any, asked: bool, name: str) -> None:
        parts, treedef = jax.tree.flatten(arg, is_leaf=is_stateful)
        spread = spread_axes(axes, arg, f"in_axes of {name}")
        self._parts.append((treedef, [self._part(p, a, asked, name) for p, a in zip(parts, spread, strict=True)]))

    def _part(self, part: Any, axis: Any, asked: bool, name: str) -> Any:
        if isinstance(part, Module):
            return self._module(part, axis, asked, name)
        if isinstance(part, Variable):
            if asked and axis is not None:
                self._map_variable(part, axis, name)
            return part
        if axis is not None:
            self._note_size(name, part, axis)
        self.leaves.append(part)
        self.axes.append(axis)
        return len(self.leaves) - 1

    def _module(self, module: Module, axis: Any, asked: bool, name: str) -> Module:
        if isinstance(axis, dict):
            for select, one_axis in reversed(axis.items()):
                for variable in matches(select, module):
                    self.mapped.pop(variable, None)
                    if one_axis is not None:
                        self._map_variable(variable, one_axis, f"{name}.{variable.label}")
            return module
        stacked = module._tether.stacked
        if asked and axis is not None and not (stacked and axis == 0):
            raise StackedError(
                "vmap: in_axes asks for a module to be mapped that isn't stacked."
                if not stacked
                else "vmap: a stacked module is mapped over its first axis alone.",
                at=f"{name}  ({type(module).__name__})",
                got=f"in_axes={axis}",
                expected="None, to share it between the lanes" if not stacked else "0",
                fix=[
                    "in_axes=None for this argument",
                    "tether.stack([first, second, ...])",
                    "{tether.State: 0}, for some",
                ],
            )
        if not stacked or axis is None:
            return module
        for variable in variables_of(module):
            self._map_variable(variable, 0, f"{name}.{variable.label}")
        member = restacked(module, -1)
        self.originals[id(member)] = module
        return member

    def _map_variable(self, variable: Variable, axis: int, name: str) -> None:
        value = _frame.peek(variable)
        if value is not None:
            self._note_size(name, value, axis)
            self.mapped[variable] = axis
            if isinstance(variable, Rng):  # in lanes around, the draws go to its private child
                self.mapped[own_stream(variable)] = axis

    def _note_size(self, name: str, value: Any, axis: int) -> None:
        shape = jnp.shape(value)
        if not -len(shape) <= axis < len(shape):
            raise ShapeError(
                "vmap: an argument has no such axis.",
                at=name,
                got=f"{describe(value)}, axis {axis}",
                expected=f"at least {axis + 1 if axis >= 0 else -axis} axes",
                fix="in_axes=None shares it between the lanes",
            )
        self._sizes.setdefault(name, shape[axis])

    def _common_size(self, fun: Any) -> int:
        sizes = set(self._sizes.values())
        if len(sizes) == 1:
            return sizes.pop()
        if not sizes:
            raise ArgumentError(
                "vmap: nothing is mapped, so there is no axis.",
                at=_arguments.name_of(fun),
                fix=["in_axes=0 for an argument with arrays", "axis_size=n"],
            )
        raise ShapeError(
            "vmap: the mapped axes differ in size.",
            at=_arguments.name_of(fun),
            got=", ".join(f"{name}: {size}" for name, size in self._sizes.items()),
            expected="one size",
            fix="in_axes=None for arguments that all lanes share",
        )

    def rebuilt(self, leaves: list[Any]) -> tuple[list[Any], dict[str, Any]]:
        """The arguments with other leaves."""
        new = [
            jax.tree.unflatten(treedef, [leaves[part] if isinstance(part, int) else part for part in parts])
            for treedef, parts in self._parts
        ]
        args, kwargs = self._args
        return new[: len(args)], dict(zip(kwargs, new[len(args) :], strict=True))

    def rule(self, variable: Variable) -> str | None:
        """What is done with a write to a shared Variable that differs from lane to lane."""
        return self._rules.get(variable) or variable.reduce


class _Outputs:
    """The axes of results and writes, known at the end of the trace: JAX looks at these lists after it."""

    def __init__(self, inputs: _Inputs, out_axes: Any, axis_name: Any):
        self._inputs, self._out_axes, self._axis_name = inputs, out_axes, axis_name
        self.axes: list[Any] = []
        self.module_axes: list[Any] = []
        self.write_axes: list[Any] = []
        self.rules: list[str | None] = []

    def checked(self, out: Any, frame: _frame.Frame) -> Any:
        parts = jax.tree.leaves(out, is_leaf=is_module)
        for part, axis in zip(parts, spread_axes(self._out_axes, out, "out_axes"), strict=True):
            if not isinstance(part, Module):
                self._check_unmapped(part, axis, frame)
                self.axes.append(axis)
            elif part._tether.birth > frame.birth:
                self.axes += [axis] * len(jax.tree.leaves(part))
                self.module_axes.append(axis)
        settle(frame)
        for variable in frame.written:
            axis, rule = self._write(variable, frame)
            self.write_axes.append(axis)
            self.rules.append(rule)
        return out

    def _check_unmapped(self, part: Any, axis: Any, frame: _frame.Frame) -> None:
        if axis is None and _trace.varies(part, frame.home):
            raise ArgumentError(
                "vmap: a result differs from lane to lane, and out_axes says that it doesn't.",
                got=f"{describe(part)} in each lane, out_axes None",
                fix="out_axes=0 for this result, or combine it over the lanes (jax.lax.pmean over axis_name)",
            )

    def _write(self, variable: Variable, frame: _frame.Frame) -> tuple[Any, str | None]:
        if variable in frame.given:
            return self._inputs.mapped[variable], None
        if variable.leaves_only:
            return 0, None
        if not _trace.varies(frame.values[variable], frame.home):
            return None, None
        rule = self._inputs.rule(variable)
        if rule is None:
            name = repr(variable.label) if variable.label else "variable"
            axis = f"axis {self._axis_name!r}" if self._axis_name is not None else "the mapped axis"
            raise VmapWriteError(
                "vmap: a write to a shared Variable differs from lane to lane.",
                at=variable.describe(),
                got=f"{describe(frame.values[variable])}, another in each of the {self._inputs.size} lanes of {axis}",
                expected="the same value in every lane, or a rule",
                fix=[
                    f"combine it over the lanes: {type(variable).__name__}(x, reduce='mean') at its declaration, "
                    "or jax.lax.pmean over axis_name",
                    f"one copy a lane: a stacked module, or tether.vmap(f, writes={{{name}: 'stack'}})",
                    f"leave it as it was: tether.vmap(f, writes={{{name}: 'discard'}})",
                ],
            )
        return 0, rule


def _per_argument(fun: Any, args: Any, in_axes: Any) -> list[tuple[Any, Any, bool]]:
    """Each argument with its axes, and whether they were given for it alone."""
    if in_axes is None or isinstance(in_axes, int) or callable(in_axes):
        return [(arg, in_axes, in_axes is None) for arg in args]
    if isinstance(in_axes, tuple | list) and len(in_axes) == len(args):
        return [(arg, axes, not callable(axes)) for arg, axes in zip(args, in_axes, strict=True)]
    raise ArgumentError(
        "vmap: in_axes doesn't fit the arguments.",
        at=f"{_arguments.name_of(fun)}{_arguments.signature(fun) or '(...)'}",
        got=f"in_axes={in_axes!r} for {len(args)} positional arguments",
        expected="an int, None, or a tuple with one entry for each argument",
    )


_AN_ARRAY = np.zeros(())  # what a function of one leaf is asked about in the place of a module, which holds arrays


def spread_axes(axes: Any, tree: Any, option: str) -> list[Any]:
    """For each array leaf or module of a tree, its axis, of a prefix tree of axes."""
    leaves = jax.tree.leaves(tree, is_leaf=is_stateful)
    if axes is None or isinstance(axes, int) or (is_stateful(tree) and not callable(axes)):
        return [axes] * len(leaves)
    if callable(axes):
        return [axes(_AN_ARRAY if is_stateful(leaf) else leaf) for leaf in leaves]
    if isinstance(axes, list | tuple) and isinstance(tree, list | tuple) and len(axes) == len(tree):
        return [axis for part, sub in zip(axes, tree, strict=True) for axis in spread_axes(part, sub, option)]
    if isinstance(axes, dict) and isinstance(tree, dict) and axes.keys() == tree.keys():
        return [axis for key in sorted(axes) for axis in spread_axes(axes[key], tree[key], option)]
    raise ArgumentError(
        f"vmap: {option} is no prefix of the tree that it is for.",
        got=repr(axes),
        expected=f"an int, None, or a {type(tree).__name__} like the value, of those",
    )


def _reduced(value: Any, rule: str | None) -> Any:
    if rule == "mean":
        return value.mean(0).astype(value.dtype)
    return value.sum(0).astype(value.dtype) if rule == "sum" else value
