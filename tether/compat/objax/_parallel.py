# SPDX-License-Identifier: Apache-2.0
"""Functions of a batch, each device with a part of it.

| Objax | here | what differs |
| --- | --- | --- |
| Parallel(f, vc) | ``tether.jit`` of ``tether.shard_map`` over the local devices | variables are found |
| vc.replicate() | a leading axis, one row on each device | outside of it the call replicates what f writes by itself |
| static_argnums | never mapped | strings and other objects, too |
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from tether._core import frame as _frame
from tether._core.variable import Variable
from tether._modules.selection import where
from tether._transforms import jit, shard_map
from tether.compat.objax._devices import device_mesh, get_local_devices
from tether.compat.objax._errors import MisuseError
from tether.compat.objax._names import class_name, known_as, repr_function
from tether.compat.objax._objects import Function, Module, discovered
from tether.compat.objax.random import DEFAULT_GENERATOR
from tether.compat.objax.variable import (
    RandomState,
    UnseenStates,
    VarCollection,
    cell_of,
    check_states,
    each,
    is_replicated,
    owners,
    unwrapped,
)
from tether.errors import describe


class Parallel(Module):
    """A function or module, run on all devices of this process at once, each with a part of the batch.

    Args:
        f: The function or module.
        vc: The variables that it uses; None, or none, finds them.
        reduce: Makes one result of those of the devices, which have a leading axis.
        axis_name: Of the devices, for ``functional.parallel``.
        static_argnums: Numbers of the arguments that are constants.
    Raises:
        MisuseError: the devices don't divide the batch, or an argument is no array.
    Example:
        >>> double = objax.Parallel(lambda x: 2 * x)
        >>> double(jnp.arange(4.0 * double.ndevices)).shape == (4 * double.ndevices,)
        True
    """

    def __init__(
        self,
        f: Callable[..., Any],
        vc: VarCollection | None = None,
        reduce: Callable[[Any], Any] = jnp.concatenate,
        axis_name: str = "device",
        static_argnums: tuple[int, ...] | None = None,
    ):
        self.axis_name = axis_name
        self.ndevices = len(get_local_devices())
        self.reduce = reduce
        self.static_argnums = frozenset(static_argnums or ())
        self.vc = vc or discovered(f)
        self.__wrapped__ = f if isinstance(f, Module) else Function(f, self.vc)
        self._function = f
        self._reduced: set[Variable] = set()  # cells that f writes, in any trace
        call = known_as(f, functools.partial(self._mapped, (f, DEFAULT_GENERATOR)))
        self._call = jit(call, static_argnums=tuple(sorted(self.static_argnums)))

    def device_reshape(self, x: Any) -> Any:
        """An array with a leading axis of the devices; a scalar is the same for all of them."""
        if not hasattr(x, "ndim"):
            raise MisuseError(
                f"Expected JaxArray, got {type(x)}.",
                got=describe(x),
                expected="an array",
                fix=["jnp.asarray(x), for a number", "static_argnums, for a constant"],
            )
        if x.ndim == 0:
            return np.broadcast_to(x, [self.ndevices])
        if x.shape[0] % self.ndevices:
            raise MisuseError(
                f"Must be able to equally divide batch {x.shape} among {self.ndevices} devices.",
                got=f"{describe(x)}, a batch of {x.shape[0]}",
                expected=f"a multiple of {self.ndevices}, the number of devices",
                fix=["pad the batch, or leave out the rest", "static_argnums, for an argument without a batch"],
            )
        return x.reshape((self.ndevices, x.shape[0] // self.ndevices, *x.shape[1:]))

    def __call__(self, *args: Any) -> Any:
        """Calls the function on all devices.

        Within ``vc.replicate()`` each device has its own variables, and keeps them until its end.
        """
        loose = VarCollection((n, v) for n, v in self.vc.items() if not is_replicated(v))
        if loose:
            return self._replicating(loose, args)
        try:
            out = self._call(*[a if n in self.static_argnums else self._rows(a) for n, a in enumerate(args)])
            return jax.tree.map(lambda rows: self.reduce(jax.device_put(rows, get_local_devices()[0])), out)
        except UnseenStates as unseen:
            self.vc = VarCollection(self.vc.items())
            self.vc.update((f"found[{len(self.vc) + n}]", state) for n, state in enumerate(unseen.states))
        return self(*args)

    def _replicating(self, loose: VarCollection, args: Any) -> Any:
        """A call that replicates by itself: what f doesn't write stays as it is, to the bit, and after an error all."""
        kept = {cell_of(v): v.value for v in each(loose) if not isinstance(v, RandomState)}
        try:
            with loose.replicate():
                out = self(*args)
            kept = {cell: value for cell, value in kept.items() if cell not in self._reduced}
        finally:
            for cell, value in kept.items():
                _frame.write(cell, value)
        return out

    def _rows(self, arg: Any) -> Any:
        sharding = NamedSharding(device_mesh(self.axis_name), PartitionSpec(self.axis_name))
        return jax.tree.map(lambda x: jax.device_put(self.device_reshape(x), sharding), unwrapped(arg))

    def _mapped(self, reachable: Any, *rows: Any) -> Any:
        cells = list(dict.fromkeys(map(cell_of, each(self.vc))))
        spec = PartitionSpec(self.axis_name)

        def block(_: Any, *rows: Any) -> Any:
            given = {cell: _frame.read(cell)[0] for cell in cells}
            for cell, row in given.items():
                _frame.write(cell, row)
            args = [a if n in self.static_argnums else jax.tree.map(lambda x: x[0], a) for n, a in enumerate(rows)]
            out = self._function(*args)
            check_states(each(self.vc))
            for variable in owners(cells):
                if variable._reduce and _frame.read(cell_of(variable)) is not given[cell_of(variable)]:
                    self._reduced.add(cell_of(variable))
            for cell in cells:
                _frame.write(cell, _frame.read(cell)[None])
            return jax.tree.map(lambda x: jnp.asarray(x)[None], out)

        mapped = shard_map(
            functools.partial(block, reachable),
            mesh=device_mesh(self.axis_name),
            in_specs=(*(None if n in self.static_argnums else spec for n in range(len(rows))),),
            out_specs=spec,
            states={where(lambda _, cell: cell in cells): spec} if cells else None,
            check_vma=False,
        )
        return mapped(*rows)

    def __repr__(self) -> str:
        return (
            f"{class_name(self)}(f={self.__wrapped__}, reduce={repr_function(self.reduce)}, "
            f"axis_name={self.axis_name!r}, static_argnums={tuple(sorted(self.static_argnums)) or None})"
        )
