# SPDX-License-Identifier: Apache-2.0
"""place: moves a module to a device or sharding, in place."""

from __future__ import annotations

from typing import Any

import jax

from tether._core import Variable
from tether._core import frame as _frame
from tether._modules import Module, matches


def place(model: Module, where: Any, select: Any = Variable) -> None:
    """Moves the arrays of a module to a device or sharding, in place; later writes keep them there.

    Args:
        model: The module.
        where: A ``jax.Device`` or ``jax.sharding.Sharding``.
        select: Which Variables; all by default.
    Example:
        >>> layer = nn.Linear(2, 3)
        >>> tether.place(layer, jax.devices()[0])
        >>> layer.weight.committed
        True
    """
    if isinstance(where, jax.Device):  # from a mesh with explicit axes, a bare device would keep the array's type on it
        where = jax.sharding.SingleDeviceSharding(where)
    variables = matches(select, model)
    _frame.write_back(variables, jax.device_put(_frame.gather(variables), where))
