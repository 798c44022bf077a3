# SPDX-License-Identifier: Apache-2.0
"""Dropout.

| Equinox | here | what differs |
| --- | --- | --- |
| Dropout | the same draws | |
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from tether.compat.equinox._errors import CallError
from tether.compat.equinox.module import Module
from tether.compat.equinox.nn._arguments import renamed_inference

__all__ = ["Dropout"]


class Dropout(Module):
    """Sets each element to 0 with probability p, and divides the others by 1 - p.

    Args:
        p: The probability, a leaf.
        inference: Whether nothing is dropped, a leaf. ``eqx.tree_inference`` sets it, and so does an argument of the
            call, for that call.
        deterministic: Old name of inference.
    Raises:
        RuntimeError: a call that drops has no key.
    Example:
        >>> y = eqx.nn.Dropout(0.5)(jnp.ones(64), key=jax.random.PRNGKey(0))
        >>> sorted(set(y.tolist()))
        [0.0, 2.0]
    """

    p: float
    inference: bool

    def __init__(self, p: float = 0.5, inference: bool = False, *, deterministic: bool | None = None):
        self.p = p
        self.inference = renamed_inference("Dropout", inference, deterministic, stacklevel=4)

    @property
    def deterministic(self) -> bool:
        """Old name of inference."""
        return self.inference

    def __call__(
        self, x: Any, *, key: Any = None, inference: bool | None = None, deterministic: bool | None = None
    ) -> jax.Array:
        """The input, or what is kept of it."""
        inference = renamed_inference("Dropout", inference, deterministic)
        # p first: it is a number where inference is traced.
        if (isinstance(self.p, int | float) and self.p == 0) or (self.inference if inference is None else inference):
            return x
        if key is None:
            raise CallError(
                "Dropout: a call that drops needs a key.",
                got="key=None, inference=False",
                fix=["dropout(x, key=key)", "inference=True, of the call, or by eqx.tree_inference(model, True)"],
            )
        keep = 1.0 - self.p
        return jnp.where(jax.random.bernoulli(key, keep, x.shape), x / keep, 0)
