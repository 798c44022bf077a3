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


def multi_host_barrier() -> None:
    """Waits for what was computed before."""
    jax.random.normal(jax.random.PRNGKey(0), ()).block_until_ready()
