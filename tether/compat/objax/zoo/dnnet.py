# SPDX-License-Identifier: Apache-2.0
"""A network of linear layers.

| Objax | here | what differs |
| --- | --- | --- |
| DNNet | the same layers | nothing |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

from tether.compat.objax._errors import MisuseError
from tether.compat.objax.nn import Linear, Sequential


class DNNet(Sequential):
    """Linear layers, an activation after each, the last one too.

    Args:
        layer_sizes: Number of inputs, then of the outputs of each layer.
        activation: The activation.
    Raises:
        MisuseError: not two sizes at least.
    Example:
        >>> from tether.compat.objax.zoo.dnnet import DNNet
        >>> DNNet([4, 8, 2], objax.functional.softmax)(jnp.ones((3, 4))).sum(1).round(5).tolist()
        [1.0, 1.0, 1.0]
    """

    def __init__(self, layer_sizes: Iterable[int], activation: Callable[..., Any]):
        sizes = list(layer_sizes)
        if len(sizes) < 2:
            raise MisuseError(
                "DNNet: no layer.",
                got=f"layer_sizes={sizes}",
                expected="the number of inputs, and of the outputs of each layer",
            )
        super().__init__(layer for nin, nout in pairwise(sizes) for layer in (Linear(nin, nout), activation))
