# SPDX-License-Identifier: Apache-2.0
"""What the optimizers have in common: their lists of variables, and the check of gradients.

| Objax | here | what differs |
| --- | --- | --- |
| an assert on the number of gradients | an error | their shapes are checked, too |
| dtypes promote | rates take the dtype of the variable, which it keeps | |
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tether.compat.objax._errors import MisuseError
from tether.compat.objax._names import class_name
from tether.compat.objax.module import ModuleList
from tether.compat.objax.variable import BaseVar, StateVar, TrainRef, TrainVar, VarCollection
from tether.errors import describe


def first(x: jax.Array) -> jax.Array:
    """The first entry: counters are the same on all devices."""
    return x[0]


def counter() -> StateVar:
    """A count of steps, 0."""
    return StateVar(jnp.zeros((), jnp.uint32), reduce=first)


def trainable(vc: VarCollection) -> ModuleList:
    """References to the TrainVars of a collection, each once."""
    variables: Any = vc.subset(TrainVar)
    return ModuleList(TrainRef(variable) for variable in variables)


def moments(train_vars: ModuleList) -> ModuleList:
    """A StateVar of zeros for each."""
    return ModuleList(StateVar(jnp.zeros_like(variable.value)) for variable in train_vars)


def check_gradients(optimizer: Any, grads: Sequence[Any]) -> None:
    """Checks that there is a gradient for each variable, of its shape."""
    train_vars = optimizer.train_vars
    if len(grads) != len(train_vars):
        raise MisuseError(
            f"{class_name(optimizer)}: Expecting as many gradients as trainable variables.",
            got=f"{len(grads)} gradients",
            expected=f"{len(train_vars)}, one for each TrainVar",
            fix="the same VarCollection for GradValues and for the optimizer",
        )
    for place, (gradient, variable) in enumerate(zip(grads, train_vars, strict=True)):
        if np.shape(gradient) != variable.shape:
            raise MisuseError(
                f"{class_name(optimizer)}: a gradient hasn't the shape of its variable.",
                at=f"gradient {place}",
                got=describe(gradient),
                expected=describe(variable.value),
                fix="gradients in the order of the variables: GradValues(f, vc) of the same vc, without input_argnums",
            )


def like(value: Any, x: jax.Array) -> jax.Array:
    """A number in the dtype of an array."""
    return jnp.asarray(value.value if isinstance(value, BaseVar) else value, x.dtype)
