# SPDX-License-Identifier: Apache-2.0
"""Views: modules that share all Variables with another one and differ in settings."""

from __future__ import annotations

import dis
import functools
import sys
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from tether._core.structure import Structure, Survey, contains, is_below, joined, static_key
from tether._core.variable import Variable
from tether._modules.module import Module, each_module, structure_of, survey, variables_of
from tether._modules.selection import matches, names_module, unknown_path
from tether.errors import ArgumentError, UnusedViewWarning, describe

_MOST_KEPT = 64  # kinds of views of one module: beyond, a schedule has made them


class _Token:
    """Stands for all views of one module with one set of settings; compared by identity."""

    __slots__ = ("__weakref__",)


def view(module: Module, select: Any = None, /, **settings: Any) -> Module:
    """A module that shares all Variables of ``module`` and differs in settings.

    Args:
        module: The module; it isn't changed.
        select: Which part; None for all of it. A part set explicitly keeps its mode when the whole is
            switched later (a frozen backbone's BatchNorm stays in evaluation).
        **settings: ``training=``, ``trainable=``, or any setting that the selected modules have (``p=`` of a
            Dropout, ``compute_dtype=``, ...).
    Returns:
        The view; the same one again for the same arguments, as long as somebody holds it.
    Raises:
        SelectionError: ``select`` names nothing.
        ArgumentError: no selected module has such a setting.
    Example:
        >>> dropout = nn.Dropout(0.5)
        >>> tether.view(dropout, p=0.1).p
        0.1
    """
    return make_view(module, select, settings, depth=1)


def freeze(module: Module, select: Any = Variable, /) -> Module:
    """A view in which the selected Params are not trainable: gradients and optimizers pass them by.

    Example:
        >>> list(tether.variables(tether.freeze(nn.Linear(2, 3), "weight"), tether.Param))
        ['bias']
    """
    return make_view(module, select, {"trainable": False}, depth=1)


def make_view(module: Module, select: Any, settings: dict[str, Any], depth: int) -> Module:
    """``view``, called by a function ``depth`` calls below the user's."""
    _warn_if_discarded(depth + 1, settings)
    if not settings:
        raise ArgumentError("view: no setting is given.", fix="tether.view(model, training=False)")
    return _memoised(module, _memo_key(select, settings), lambda: _changed(module, select, settings))


def _memoised(module: Module, key: Any, make: Callable[[], Structure]) -> Module:
    """The view of one kind: the one that somebody holds, else built of the Structure made the first time."""
    structure_of(module)  # raises if this is no module
    memo = module._tether.views
    token, structure, made = memo.get(key, (_Token(), None, None))
    new = made() if made is not None else None
    if new is None:
        new = (structure or make()).build(variables_of(module), survey(module).references)
        new._tether.token = token
        if key is not None:
            memo[key] = (token, new._tether.structure, weakref.ref(new))
            while len(memo) > _MOST_KEPT:
                del memo[next(iter(memo))]
    return new


def restacked(module: Module, change: int) -> Module:
    """A module that shares all Variables, whose leaves count as having more or fewer axes of members in front."""
    return _memoised(module, ("stacked", change), lambda: _restacked(module, change))


def _restacked(module: Module, change: int) -> Structure:
    scratch = structure_of(module).build(variables_of(module))
    for _, part in each_module(scratch):
        part._tether.stacked += change
    return Survey(scratch).structure()


def _memo_key(select: Any, settings: dict[str, Any]) -> Any:
    if select is not None and not isinstance(select, str | type):
        return None
    return select, static_key(settings)


def _changed(module: Module, select: Any, settings: dict[str, Any]) -> Structure:
    """The Structure of a module with settings changed."""
    scratch = structure_of(module).build(variables_of(module))
    _apply(module, scratch, select, settings)
    return Survey(scratch).structure()


def _apply(old: Module, new: Module, select: Any, settings: dict[str, Any]) -> None:
    if not isinstance(settings.get("trainable", True), bool):
        raise ArgumentError("view: trainable is True or False.", got=describe(settings["trainable"]))
    if "trainable" in settings:
        _set_trainable(old, new, select, settings["trainable"])
    settings = {name: value for name, value in settings.items() if name != "trainable"}
    if not settings:
        return
    parts = _selected_modules(old, new, select)
    for name, value in settings.items():
        if name == "training":
            _set_training(parts, value, explicit=select is not None)
            continue
        holders = [part for part in parts if name in vars(part)]
        _check_setting(holders, name, value)
        if not holders:
            raise ArgumentError(
                f"view: no selected module has the setting {name!r}.",
                at=", ".join(sorted({type(part).__name__ for part in parts})),
                fix=f"select modules that have {name!r}, or use another setting",
            )
        for part in holders:
            vars(part)[name] = value


def _check_setting(holders: list[Module], name: str, value: Any) -> None:
    if any(contains(vars(part)[name], modules=True) for part in holders):
        raise ArgumentError(
            f"view: {name!r} is no setting: it holds a cell or a module.",
            at=", ".join(sorted({type(part).__name__ for part in holders})),
            fix=[
                f"tether.bind(model, {{{name!r}: array}}) for another value",
                f"tether.replace(model, {{{name!r}: part}})",
            ],
        )
    if isinstance(value, jax.Array | np.ndarray):
        raise ArgumentError(f"view: {name!r} can't be an array.", got=describe(value), expected="a hashable setting")
    static_key(value, name)


def _set_training(parts: list[Module], value: Any, explicit: bool) -> None:
    if not isinstance(value, bool):
        raise ArgumentError("view: training is on or off.", got=describe(value), expected="True or False")
    for part in parts:
        if explicit or not part._tether.explicit:
            part._tether.training, part._tether.explicit = value, explicit or part._tether.explicit


def _set_trainable(old: Module, new: Module, select: Any, trainable: bool) -> None:
    chosen = set(variables_of(old) if select is None else matches(select, old))
    for path, part in each_module(new):
        places = structure_of(old).places
        inside = {_relative(place, path) for place, i in places.items() if is_below(place, path)}
        own = {name for name in inside if variables_of(old)[places[joined(path, name)]] in chosen}
        part._tether.frozen = part._tether.frozen - own if trainable else part._tether.frozen | own


def _relative(place: str, path: str) -> str:
    return place[len(path) :].lstrip(".") if path else place


def _selected_modules(old: Module, new: Module, select: Any) -> list[Module]:
    """The modules of the new tree that a selection names, and all below them."""
    pairs = [
        (path, before, after) for (path, before), (_, after) in zip(each_module(old), each_module(new), strict=True)
    ]
    if select is None:
        return [after for _, _, after in pairs]
    places = {id(part): [place for place, p in survey(old).module_places.items() if p is part] for _, part, _ in pairs}
    named = [
        before for _, before, _ in pairs if any(names_module(select, place, before) for place in places[id(before)])
    ]
    if not named:
        raise unknown_path(str(select), [path for path, _, _ in pairs if path], "view: no module is selected")
    tops = [place for part in named for place in places[id(part)]]
    is_inside = lambda part: any(is_below(place, top) for place in places[id(part)] for top in tops)
    return [after for _, before, after in pairs if is_inside(before)]


def _warn_if_discarded(depth: int, settings: dict[str, Any]) -> None:
    if result_is_discarded(depth + 1):
        call = ", ".join(f"{name}={value!r}" for name, value in settings.items())
        message = (
            f"a view was made ({call}) and thrown away: it changes nothing by itself.\n"
            "  fix:      keep it (evaluating = model.eval()), call it (model.eval()(x)), "
            "or pass the mode at the call (model(x, training=False))"
        )
        warnings.warn(message, UnusedViewWarning, stacklevel=depth + 2)


def result_is_discarded(depth: int) -> bool:
    """Whether the call that is running ``depth`` frames up is a statement, its result thrown away."""
    frame = sys._getframe(depth + 1)
    return frame.f_lasti in _discarding_calls(frame.f_code)


@functools.lru_cache(maxsize=1024)
def _discarding_calls(code: Any) -> frozenset[int]:
    steps = list(dis.get_instructions(code))
    pairs = zip(steps, steps[1:], strict=False)  # the last index may lie in the cache entries behind a call
    spans = [range(step.offset, after.offset, 2) for step, after in pairs if after.opname == "POP_TOP"]
    return frozenset(offset for span in spans for offset in span)
