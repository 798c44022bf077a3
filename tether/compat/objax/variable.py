# SPDX-License-Identifier: Apache-2.0
"""Variables and collections of them.

| Objax | here | what differs |
| --- | --- | --- |
| TrainVar(x) | a cell of kind Param | it never holds a tracer after its trace |
| StateVar(x) | a cell of kind State | the same; NumPy arrays and numbers become JAX arrays |
| RandomState(seed) | a cell of kind State | found by Jit even where a list doesn't name it |
| TrainRef(v) | the cell of v | a gradient isn't lost if v and its TrainRef are both listed |
| VarCollection | a dict, as before | conflicts go by identity; ``replicate`` ends in any case |

A write goes to the cell unchecked, as Objax wrote its attribute; ``assign`` checks first.
"""

from __future__ import annotations

import abc
import contextlib
import math
import re
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from tether._core import frame as _frame
from tether._core.variable import Param, State, Variable, strong
from tether._transforms._discovery import Searched
from tether.compat.objax._check import assert_assigned_type_and_shape_match, check_fits_ref
from tether.compat.objax._devices import device_mesh, get_local_devices, taken_out
from tether.compat.objax._errors import ConflictError, MisuseError
from tether.compat.objax._names import class_name, repr_function

__all__ = ["BaseState", "BaseVar", "RandomState", "StateVar", "TrainRef", "TrainVar", "VarCollection"]

_MAX_WIDTH = 100


class TrainCell(Param):
    """The cell of a TrainVar."""

    __slots__ = ("owner",)


class StateCell(State):
    """The cell of a StateVar."""

    __slots__ = ("owner",)


class KeyCell(State):
    """The cell of a RandomState."""

    __slots__ = ("owner",)


class UnseenStates(Exception):
    """Ends a run that drew from random states which were not found before: what it gave is not used."""

    def __init__(self, states: list[BaseVar]):
        super().__init__()
        self.states = states


def check_states(known: Iterable[BaseVar]) -> None:
    """Inside a transformation: whether what has been drawn came from states that are known."""
    cells = set(map(cell_of, known))
    drawn = [c for c in _frame.thread.frames[-1].reads if isinstance(c, KeyCell) and c not in cells]
    if drawn:
        raise UnseenStates(owners(drawn))


def reduce_mean(x: jax.Array) -> jax.Array:
    """The mean over the first axis."""
    return x.mean(0)


def cell_of(variable: BaseVar) -> Variable:
    """The cell where the value of a variable stands."""
    return variable.ref._cell if isinstance(variable, TrainRef) else variable._cell


def _as_held(value: Any) -> Any:
    """What a cell holds for a value: JAX arrays, for NumPy ones and numbers too; other objects as they are."""
    if isinstance(value, BaseVar):
        value = value.value
    if isinstance(value, np.ndarray | np.generic | bool | int | float | complex):
        value = jnp.asarray(value)
    return strong(value)


_replicated: weakref.WeakSet[Variable] = weakref.WeakSet()


def is_replicated(variable: BaseVar) -> bool:
    """Whether each device has a copy of a variable, in ``VarCollection.replicate``."""
    return cell_of(variable) in _replicated


def _made(variable: BaseVar, kind: type[Variable], value: Any) -> Variable:
    """The cell of a variable; Tether's own transformations reduce it as Objax's do, where they know how."""
    rule = {reduce_mean: "mean", None: "discard"}.get(variable._reduce)
    cell: Any = kind.make(value, reduce=rule)
    cell.owner = weakref.ref(variable)
    return cell


def owners(cells: Iterable[Variable]) -> list[BaseVar]:
    """The variables whose cells these are."""
    found = [cell.owner() for cell in cells if isinstance(cell, TrainCell | StateCell | KeyCell)]
    return [variable for variable in found if variable is not None]


def _unwrapped(value: Any) -> Any:
    return value.value if isinstance(value, BaseVar) else value


def unwrapped(tree: Any) -> Any:
    """A tree with values in place of variables: what a transformation makes of its arguments."""
    if isinstance(tree, jax.Array | np.ndarray):
        return tree
    return jax.tree.map(_unwrapped, tree, is_leaf=lambda part: isinstance(part, BaseVar))


class BaseVar(Searched, abc.ABC):
    """What all variables have: a value, which arithmetic and array methods reach through.

    Args:
        reduce: Makes one value of the values of all examples, or devices; an array of them in front.
    """

    _cell: Any
    _kind: type[Variable] = StateCell

    def __init__(self, reduce: Callable[[jax.Array], jax.Array] | None):
        self._reduce = reduce

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        jax.tree_util.register_pytree_node(cls, lambda v: ((v.value,), v._reduce), cls._snapshot)

    @classmethod
    def _snapshot(cls, reduce: Any, children: Any) -> Any:
        """A variable apart from all others that holds a value, as JAX's tree functions make it."""
        variable = object.__new__(cls)
        variable._reduce = reduce
        variable._cell = _made(variable, cls._kind, children[0])
        return variable

    def __copy__(self) -> Any:
        other = object.__new__(type(self))
        vars(other).update(vars(self))
        if "_cell" in vars(self):
            other._cell = _made(other, type(self._cell), self.value)
        return other

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if "_cell" in state:
            self._cell.owner = weakref.ref(self)  # a copied cell has none

    def _tether_parts(self) -> dict[str, Any]:
        cell: Any = cell_of(self)
        cell.owner = weakref.ref(self.ref if isinstance(self, TrainRef) else self)
        return {"": cell}

    @property
    @abc.abstractmethod
    def value(self) -> Any:
        """The value as seen from here."""

    @value.setter
    def value(self, tensor: Any) -> None:
        raise NotImplementedError

    def assign(self, tensor: Any, check: bool = True) -> None:
        """Sets the value; with ``check``, to a JAX array of the same shape."""
        if check:
            assert_assigned_type_and_shape_match(self.value, tensor)
        self.value = tensor

    def reduce(self, tensors: Any) -> None:
        """Sets the value to what the values of all examples or devices make together."""
        if self._reduce:
            self.assign(self._reduce(tensors), check=False)

    def __repr__(self) -> str:
        value = re.sub(r"\n+", "\n", repr(self.value))
        text = f"{class_name(self)}({value}"
        return f"{text})" if not self._reduce else f"{text}, reduce={repr_function(self._reduce)})"

    __hash__ = None  # type: ignore[assignment]  # == is elementwise

    def __getitem__(self, idx: Any) -> Any:
        return self.value[idx]

    def __jax_array__(self) -> Any:
        return self.value

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.value, dtype) if copy else np.asarray(self.value, dtype)

    def __bool__(self) -> bool:
        raise TypeError(
            "To prevent accidental errors Objax variables can not be used as Python bool. "
            "To check if variable is `None` use `is None` or `is not None` instead."
        )

    def __iter__(self) -> Iterator[Any]:
        return iter(self.value)

    def __getattr__(self, name: str) -> Any:
        if name in ("_cell", "_reduce", "ref", "value") or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.value, name)

    @property
    def _value(self) -> Any:
        """The value under the name of Objax's attribute, which loaders of weights write."""
        return self.value

    @_value.setter
    def _value(self, tensor: Any) -> None:
        _set(self, tensor)

    @property
    def dtype(self) -> Any:
        """Of the value."""
        return self.value.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the value."""
        return self.value.shape

    @property
    def ndim(self) -> int:
        """Number of axes of the value."""
        return self.value.ndim


def _through(name: str) -> Callable[..., Any]:
    def method(self: BaseVar, *others: Any) -> Any:
        return getattr(self.value, name)(*map(_unwrapped, others))

    method.__name__, method.__qualname__ = name, f"BaseVar.{name}"
    return method


for _name in (
    *("neg", "pos", "abs", "invert", "eq", "ne", "lt", "le", "gt", "ge", "divmod", "rdivmod", "round"),
    *("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "floordiv", "rfloordiv", "mod", "rmod"),
    *("pow", "rpow", "matmul", "rmatmul", "and", "rand", "or", "ror", "xor", "rxor"),
    *("lshift", "rlshift", "rshift", "rrshift", "div", "rdiv"),
):
    setattr(BaseVar, f"__{_name}__", _through(f"__{_name}__"))


class TrainVar(BaseVar):
    """A variable that optimizers change.

    Args:
        tensor: Its first value.
        reduce: As in BaseVar.
    Example:
        >>> v = objax.TrainVar(jnp.zeros(2))
        >>> v.assign(v.value + 1)
        >>> (v * 2).tolist()
        [2.0, 2.0]
    """

    _kind = TrainCell

    def __init__(self, tensor: Any, reduce: Callable[[jax.Array], jax.Array] | None = reduce_mean):
        super().__init__(reduce)
        self._cell = _made(self, self._kind, _as_held(tensor))

    @property
    def value(self) -> Any:
        """The value, which ``assign`` writes."""
        return _frame.read(self._cell)

    @value.setter
    def value(self, tensor: Any) -> None:
        raise ValueError("Direct assignment not allowed, use TrainRef to update a TrainVar.")

    def assign(self, tensor: Any, check: bool = True) -> None:
        """Sets the value; with ``check``, to a JAX array of the same shape."""
        if check:
            assert_assigned_type_and_shape_match(self.value, tensor)
        _set(self, tensor)


class BaseState(BaseVar):
    """What variables have that optimizers leave alone."""


class TrainRef(BaseState):
    """A TrainVar seen as a state, whose value may be written: what optimizers hold.

    Args:
        ref: The TrainVar.
    """

    def __init__(self, ref: TrainVar):
        self.ref = ref
        super().__init__(None)

    @classmethod
    def _snapshot(cls, reduce: Any, children: Any) -> Any:
        return cls(TrainVar._snapshot(reduce, children))

    @property
    def value(self) -> Any:
        """The value of the TrainVar; a write checks shape and kind."""
        return self.ref.value

    @value.setter
    def value(self, tensor: Any) -> None:
        self.ref.assign(tensor)

    def __repr__(self) -> str:
        return f"{class_name(self)}(ref={self.ref!r})"


class StateVar(BaseState):
    """A variable that is changed by hand: statistics, moments, counters.

    Args:
        tensor: Its first value.
        reduce: As in BaseVar.
    """

    def __init__(self, tensor: Any, reduce: Callable[[jax.Array], jax.Array] | None = reduce_mean):
        super().__init__(reduce)
        self._cell = _made(self, self._kind, _as_held(tensor))

    @property
    def value(self) -> Any:
        """The value; a write checks nothing."""
        return _frame.read(self._cell)

    @value.setter
    def value(self, tensor: Any) -> None:
        _set(self, tensor)


class RandomState(StateVar):
    """The state of a random generator, a legacy key of JAX.

    Args:
        seed: A whole number.
    """

    _kind = KeyCell

    def __init__(self, seed: int):
        super().__init__(jax.random.PRNGKey(seed), None)

    def seed(self, seed: int) -> None:
        """Starts over from a seed."""
        self.value = jax.random.PRNGKey(seed)

    def split(self, n: int) -> Any:
        """Makes ``n`` keys, uint32[n, 2], and moves on."""
        keys = jax.random.split(self.value, n + 1)
        self.value = keys[0]
        return keys[1:]


class VarCollection(dict[str, BaseVar]):
    """Variables by name, in order. Iteration goes over the variables, each once, and not over the names.

    Example:
        >>> a, b = objax.TrainVar(jnp.zeros(2)), objax.StateVar(jnp.ones(()))
        >>> vc = objax.VarCollection({"a": a, "again": a, "b": b})
        >>> len(vc), len(list(vc)), list(vc.subset(objax.StateVar).keys())
        (3, 2, ['b'])
    """

    def __add__(self, other: VarCollection) -> VarCollection:
        merged = VarCollection(self.items())
        merged.update(other)
        return merged

    def __iter__(self) -> Iterator[BaseVar]:
        return iter(each(self))

    def __setitem__(self, key: str, value: BaseVar) -> None:
        if key in self and self[key] is not value:
            raise ConflictError(
                "VarCollection: this name has another variable already.",
                at=key,
                got=repr(value),
                expected=repr(self[key]),
                fix="vc.rename(objax.util.Renamer(...)), or vars(scope=...) with another scope",
            )
        dict.__setitem__(self, key, value)

    def update(self, other: Any) -> None:
        """Adds variables of another collection, or of pairs; a name in both must mean the same variable."""
        pairs = list(other.items() if isinstance(other, dict) else other)
        conflicts = sorted({name for name, variable in pairs if name in self and self[name] is not variable})
        if conflicts:
            raise ConflictError(
                f"Name conflicts when combining VarCollection {conflicts}",
                fix="vc.rename(objax.util.Renamer(...)), or vars(scope=...) with another scope",
            )
        for name, variable in pairs:
            self[name] = variable

    def assign(self, tensors: list[Any]) -> None:
        """Sets the variables, each once, in the order of the iteration."""
        variables = each(self)
        if len(variables) != len(tensors):
            raise MisuseError(
                "VarCollection.assign: not as many tensors as variables.",
                got=f"{len(tensors)} tensors",
                expected=f"{len(variables)}, one for each variable",
            )
        for variable, tensor in zip(variables, tensors, strict=True):
            variable.assign(tensor)

    def __str__(self, max_width: int = _MAX_WIDTH) -> str:
        width = min(max_width, max([20, *map(len, self.keys())]))
        sizes = [math.prod(variable.shape) for variable in self.values()]
        lines = [
            f"{name:{width}} {size:8d} {variable.shape}"
            for (name, variable), size in zip(self.items(), sizes, strict=True)
        ]
        return "\n".join([*lines, f"{f'+Total({len(sizes)})':{width}} {sum(sizes):8d}"])

    def rename(self, renamer: Callable[[str], str]) -> VarCollection:
        """The same variables under other names."""
        return VarCollection({renamer(name): variable for name, variable in self.items()})

    @contextlib.contextmanager
    def replicate(self) -> Iterator[None]:
        """Gives each device a copy of the variables, a leading axis; at the end ``reduce`` makes one of them.

        Those that have copies already, in a ``replicate`` around, keep them.
        """
        devices, sharding = get_local_devices(), NamedSharding(device_mesh("device"), PartitionSpec("device"))
        own = list({cell_of(v): v.ref if isinstance(v, TrainRef) else v for v in each(self)}.values())
        states: dict[int, Any] = {}  # random states, as they go on later
        replicated: list[tuple[BaseVar, Any]] = []
        try:
            for variable in (v for v in own if not is_replicated(v)):
                if isinstance(variable, RandomState):
                    copies = variable.split(len(devices))
                    states[id(variable)] = variable.value
                else:
                    copies = jnp.broadcast_to(variable.value, (len(devices), *variable.shape))
                replicated.append((variable, taken_out(cell_of(variable))))
                _set(variable, jax.device_put(copies, sharding))
                _replicated.add(cell_of(variable))
            yield
        finally:
            for variable, ref in replicated:
                cell, copies = cell_of(variable), variable.value
                _replicated.discard(cell)
                taken_out(cell)
                if ref is not None:
                    _frame.set_value(cell, ref)
                if isinstance(variable, RandomState):
                    _set(variable, states[id(variable)])
                else:
                    variable.reduce(jax.device_put(copies, devices[0]))

    def subset(self, is_a: Any = None, is_not: Any = None) -> VarCollection:
        """The variables of some classes, or not of some; with neither given, none."""

        def fits(variable: BaseVar) -> bool:
            return (not is_a or isinstance(variable, is_a)) and not (is_not and isinstance(variable, is_not))

        return VarCollection([(n, v) for n, v in self.items() if fits(v)] if is_a or is_not else ())

    def tensors(self, is_a: Any = None) -> list[Any]:
        """The values, each variable once, in the order of the iteration."""
        return [variable.value for variable in each(self) if not is_a or isinstance(variable, is_a)]


def each(vc: VarCollection) -> list[BaseVar]:
    """The variables of a collection, each once, in order."""
    return list({id(variable): variable for variable in vc.values()}.values())


def _set(variable: BaseVar, value: Any) -> None:
    cell, value = cell_of(variable), _as_held(value)
    check_fits_ref(cell, value)
    _frame.write(cell, value)
