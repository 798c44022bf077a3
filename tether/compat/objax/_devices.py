# SPDX-License-Identifier: Apache-2.0
"""The devices of this process.

| Objax | here | what differs |
| --- | --- | --- |
| get_local_devices | ``jax.local_devices()`` | nothing |
| map_to_device | ``jax.device_put`` along a mesh of them | the leading axis must be their number |
| multi_host_barrier | one small computation | nothing |
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tether._core import frame as _frame
from tether._core import ref as _ref
from tether._core.variable import Variable


def get_local_devices() -> list[Any]:
    """The devices of this process, in order."""
    return list(jax.local_devices())


def device_mesh(axis_name: str) -> Mesh:
    """All of them along one axis."""
    return Mesh(np.array(get_local_devices()), (axis_name,))


def map_to_device(x: Any) -> Any:
    """Puts the rows of each array of a tree on the devices, one on each."""
    sharding = NamedSharding(device_mesh("device"), PartitionSpec("device"))
    return jax.tree.map(lambda leaf: jax.device_put(leaf, sharding), x)


def taken_out(cell: Variable) -> Any:
    """Takes an array out of the ``jax.Ref`` where a plain JAX transformation put it, and gives the Ref, or None.

    A Ref keeps its shape and device; once it is the value of the cell again, it is written as before.
    """
    if _frame.thread.frames or not _ref.holds(cell):
        return None
    ref = cell._value
    _frame.keep(cell, _frame.held(cell))
    return ref


def multi_host_barrier() -> None:
    """Waits for what was computed before."""
    jax.random.normal(jax.random.PRNGKey(0), ()).block_until_ready()
