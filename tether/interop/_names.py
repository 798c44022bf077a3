# SPDX-License-Identifier: Apache-2.0
"""Which tensors of a PyTorch state_dict are which cells of a model.

A Link says that some tensors and some cells hold the same numbers, and how to get from one to the other. Mostly it is
one tensor and one cell of one layout, under names that differ in punctuation: ``layer1[0].conv1.weight`` here is
``layer1.0.conv1.weight`` there. What differs in more than that is in the table of ``_layouts``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tether._core import Rng, Variable
from tether._core import frame as _frame
from tether._core.structure import is_below, joined
from tether._modules import Module
from tether._modules.module import structure_of, survey, variables_of
from tether.errors import ArgumentError
from tether.interop._layouts import WRAPPERS, Convert, Layout, layouts_of, same


class Spec(NamedTuple):
    """Shape and dtype of an array that is not there."""

    shape: tuple[int, ...]
    dtype: np.dtype

    def zeros(self) -> np.ndarray:
        """An array like it that takes no memory."""
        return np.broadcast_to(np.zeros((), self.dtype), self.shape)


def spec_of(variable: Variable) -> Spec:
    """Shape and dtype of a cell, which may hold a jax.ShapeDtypeStruct."""
    held = _frame.peek(variable)
    return Spec(tuple(held.shape), np.dtype(held.dtype))


class Link(NamedTuple):
    """Tensors and cells of one model that hold the same numbers.

    Attributes:
        names: Of the tensors.
        paths, variables: Of the cells.
        read, write, alternative: As in Layout.
    """

    names: tuple[str, ...]
    paths: tuple[str, ...]
    variables: tuple[Variable, ...]
    read: Convert = same
    write: Convert = same
    alternative: bool = False

    def specs(self) -> list[Spec]:
        """Shape and dtype that each tensor has if it fits."""
        return [Spec(t.shape, t.dtype) for t in self.write([spec_of(v).zeros() for v in self.variables])]


# What PyTorch keeps and nothing here needs: the number of batches that a BatchNorm has seen.
IGNORED = re.compile(r"(.*\.)?num_batches_tracked")


def links(model: Module) -> list[Link]:
    """All links of a model, in the order of its cells: one for every place of a tied cell, none for random streams.

    Raises:
        ArgumentError: two cells would have one name.
    """
    names, places = Names(model), _places(model)
    free, found = dict(places), []
    for module, layouts in names.layouts():
        fitting = [x for x in layouts if all(joined(module, path) in free for path in x.paths)]
        for layout in fitting:
            found.append(_link(layout, module, names, places))
        for path in {joined(module, path) for x in fitting if not x.alternative for path in x.paths}:
            del free[path]
    found += [Link((names.of(path),), (path,), (variable,)) for path, variable in free.items()]
    found = [names.unstacked(link) for link in found]
    order = {path: number for number, path in enumerate(places)}
    return _distinct(sorted(found, key=lambda link: order[link.paths[0]]))


def _places(model: Module) -> dict[str, Variable]:
    """Every path of every cell of numbers: no stream of random keys, no None or mask that a tree function put there."""
    structure, variables = structure_of(model), variables_of(model)
    places = {path: variables[index] for path, index in structure.places.items()}
    return {path: variable for path, variable in places.items() if _holds_numbers(variable)}


def _holds_numbers(variable: Variable) -> bool:
    dtype = getattr(_frame.peek(variable), "dtype", None)
    is_key = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
    return dtype is not None and not is_key and not isinstance(variable, Rng)


def _link(layout: Layout, module: str, names: Names, places: dict[str, Variable]) -> Link:
    paths = tuple(joined(module, path) for path in layout.paths)
    of_tensors = tuple(joined(names.of(module), name) for name in layout.names)
    variables = tuple(places[path] for path in paths)
    return Link(of_tensors, paths, variables, layout.read, layout.write, layout.alternative)


class Names:
    """How PyTorch would name what lies in a model."""

    def __init__(self, model: Module):
        self._modules = survey(model).module_places
        inner = [joined(path, "layer") for path, module in self._modules.items() if isinstance(module, WRAPPERS)]
        self._inner = sorted(inner, key=len, reverse=True)
        stacked = {path: module._tether.stacked for path, module in self._modules.items() if module._tether.stacked}
        inside = {path for path in stacked for other in stacked if path != other and is_below(path, other)}
        self._stacked = {path: count for path, count in stacked.items() if path not in inside}

    def of(self, path: str) -> str:
        """The name of what lies at a path: ``layers[0].weight`` is ``layers.0.weight``."""
        for inner in self._inner:
            if is_below(path, inner):
                path = inner.removesuffix("layer") + path[len(inner) :].lstrip(".")
        return re.sub(r"\[(['\"]?)(.*?)\1\]", r".\2", path).strip(".")

    def layouts(self) -> Iterator[tuple[str, list[Layout]]]:
        """What the table says of each module at each of its paths, outer modules first."""
        return ((path, layouts_of(module)) for path, module in self._modules.items())

    def unstacked(self, link: Link) -> Link:
        """Of a link in a stacked module, that of its members' tensors: ``blocks.0.weight``, ``blocks.1.weight``."""
        place = next((path for path in self._stacked if is_below(link.paths[0], path)), None)
        if place is None:
            return link
        head, axes = self.of(place), self._stacked[place]
        sizes = spec_of(link.variables[0]).shape[:axes]
        members = [joined(head, ".".join(map(str, index))) for index in np.ndindex(sizes)]
        tails = [name[len(head) :].lstrip(".") for name in link.names]
        count = len(tails)

        def read(tensors: list[np.ndarray]) -> list[np.ndarray]:
            rows = [link.read(tensors[i : i + count]) for i in range(0, len(tensors), count)]
            stacks = [np.stack(column) for column in zip(*rows, strict=True)]
            return [stack.reshape(sizes + stack.shape[1:]) for stack in stacks]

        def write(values: list[np.ndarray]) -> list[np.ndarray]:
            return [x for index in np.ndindex(sizes) for x in link.write([value[index] for value in values])]

        return link._replace(names=tuple(joined(m, t) for m in members for t in tails), read=read, write=write)


def _distinct(found: list[Link]) -> list[Link]:
    """The links, without alternatives that are the name of another cell; else no two have one name."""
    first: dict[str, Link] = {}
    for link in (link for link in found if not link.alternative):
        for name in link.names:
            if name in first:
                raise ArgumentError(
                    "interop.torch: two cells of the model would have one name in PyTorch.",
                    at=f"{', '.join(first[name].paths)} and {', '.join(link.paths)}",
                    got=repr(name),
                    expected="a name for each",
                    fix="rename one of the attributes, lists or keys that lead to them",
                )
            first[name] = link
    return [link for link in found if not (link.alternative and first.keys() & set(link.names))]
