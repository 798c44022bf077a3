# SPDX-License-Identifier: Apache-2.0
"""Whether tensors by name fit a model: every fault is found before anything is written, and one error says them all."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from tether._core import Variable
from tether.errors import StructureError, describe
from tether.interop._names import IGNORED, Link, Spec, spec_of

_KINDS = (jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating)


class Fit:
    """What becomes of tensors and cells: values for cells, and what doesn't fit.

    Args:
        links: Of the model.
        tensors: Arrays by the names that the links have.
        chosen: The cells that are wanted; tensors of others are passed over.
    Attributes:
        values: The value of each cell that gets one, of its shape and dtype.
        missing: Spec and path of each tensor that the model wants and that isn't there, by its name.
        unexpected: Each tensor that the model has no cell for.
        others: What else is wrong: (kind, name, text).
    """

    def __init__(self, links: list[Link], tensors: Mapping[str, np.ndarray], chosen: set[Variable]):
        self.values: dict[Variable, np.ndarray] = {}
        self.missing: dict[str, tuple[Spec, str]] = {}
        self.others: list[tuple[str, str, str]] = []
        known = {name for link in links for name in link.names}
        self.unexpected = {n: x for n, x in tensors.items() if n not in known and not IGNORED.fullmatch(n)}
        self._tensors, self._chosen = tensors, chosen
        self._source: dict[Variable, str] = {}  # of each cell that some tensor is for
        wanted = [link for link in links if chosen.intersection(link.variables)]
        there = [any(name in tensors for name in link.names) for link in wanted]
        # Those without tensors last: a tied cell may have one under another of its names; of these, first its own name.
        for link, _ in sorted(zip(wanted, there, strict=True), key=lambda pair: (not pair[1], pair[0].alternative)):
            self._take(link)

    def _take(self, link: Link) -> None:
        """Notes the values that the tensors of one link give, or why they give none."""
        place, specs = ", ".join(link.paths), dict(zip(link.names, link.specs(), strict=True))
        given = {name: self._tensors[name] for name in link.names if name in self._tensors}
        if not given and all(variable in self._source for variable in link.variables):
            return
        self.missing.update({name: (spec, place) for name, spec in specs.items() if name not in given})
        wrong = [(name, x, specs[name]) for name, x in given.items() if not _holds(x, specs[name])]
        self.others += [
            ("mismatched", name, f"{describe(x)}, and the model has {describe(spec)}{_at(place, name)}")
            for name, x, spec in wrong
        ]
        if len(given) == len(link.names) and not wrong:
            self._give(link, list(given.values()), place)
        for variable in link.variables:
            self._source.setdefault(variable, link.names[0])

    def _give(self, link: Link, given: list[np.ndarray], place: str) -> None:
        for variable, value in zip(link.variables, link.read(given), strict=True):
            value = _cast(value, spec_of(variable).dtype)
            if variable in self.values and not _equal(self.values[variable], value):
                first = self._source[variable]
                text = f"not equal to {first}, to which it is tied{_at(place, link.names[0])}"
                self.others.append(("different", link.names[0], text))
            elif variable in self._chosen:
                self.values[variable] = value

    def faults(self, strict: bool) -> list[str]:
        """What doesn't fit, a line each; without strict only what can't be passed over."""
        rows = list(self.others)
        if strict:
            missing = self.missing.items()
            rows += [("missing", name, f"{describe(spec)}{_at(path, name)}") for name, (spec, path) in missing]
            rows += [("unexpected", name, describe(array)) for name, array in self.unexpected.items()]
        width = max((len(name) for _, name, _ in rows), default=0)
        return [f"{kind:<10}  {name:<{width}}  {text}" for kind, name, text in rows]

    def error(self, strict: bool, at: str | None, user: str) -> StructureError:
        """The error that says all of it."""
        lines = self.faults(strict)
        count = f"{_number(len(lines), 'fault')}, with {_number(len(self._tensors), 'tensor')} given"
        return StructureError(
            f"{user}: the tensors don't fit the model; nothing was written.",
            at=at,
            got="\n    ".join([count, *lines]),
            expected="for each cell a tensor of its shape, and no others",
            fix=self._fixes(strict),
        )

    def _fixes(self, strict: bool) -> list[str]:
        kinds = {kind for kind, _, _ in self.others}
        fixes = _prefix_rule(list(self.missing), set(self.unexpected)) if strict else []
        if "mismatched" in kinds:
            fixes.append("a model of the sizes of the tensors; transforms={pattern: np.transpose} for another layout")
        if "different" in kinds:
            fixes.append("a model in which the two are not tied")
        if strict and (self.missing or self.unexpected):
            fixes.append("rules={pattern: replacement} for other names, None to leave a tensor out")
            fixes.append("strict=False to load what is there; the result tells of the rest")
        if self.missing or "mismatched" in kinds:
            fixes.append("select=... for the cells to load, if others shall keep their values")
        return fixes


def _at(path: str, name: str) -> str:
    """The path, where it is not the name."""
    return "" if path == name else f", at {path}"


def _number(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _holds(array: np.ndarray, spec: Spec) -> bool:
    """Whether a tensor has the shape, and numbers that a cell of the dtype can hold."""
    if tuple(array.shape) != spec.shape or _rank(array.dtype) > _rank(spec.dtype):
        return False
    if not jnp.issubdtype(spec.dtype, jnp.integer) or array.dtype == spec.dtype:
        return True
    return bool(np.all(array.astype(spec.dtype) == array))  # of int64, what lies outside int32 would wrap around


def _rank(dtype: Any) -> int:
    return next((rank for rank, kind in enumerate(_KINDS) if jnp.issubdtype(dtype, kind)), len(_KINDS))


def _cast(value: np.ndarray, dtype: np.dtype) -> np.ndarray:
    with np.errstate(over="ignore"):  # a float too large for a narrower dtype is infinite, as everywhere in JAX
        return value.astype(dtype, copy=False)


def _equal(one: np.ndarray, two: np.ndarray) -> bool:
    return one.tobytes() == two.tobytes()  # NaN equals itself


def _prefix_rule(missing: list[str], unexpected: set[str]) -> list[str]:
    """The rule that takes a prefix off or puts one on, where that explains all that is missing."""
    if not missing:
        return []
    first = missing[0]
    for other in sorted(unexpected):
        off, on = other.removesuffix(first), first.removesuffix(other)
        if other.endswith(f".{first}") and unexpected.issuperset(off + name for name in missing):
            return [f"rules={{{f'^{re.escape(off)}'!r}: ''}} takes the prefix off"]
        if first.endswith(f".{other}") and unexpected.issuperset(name.removeprefix(on) for name in missing):
            return [f"rules={{'^': {on!r}}} puts the prefix on"]
    return []
