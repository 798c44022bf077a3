# SPDX-License-Identifier: Apache-2.0
"""Modules as TensorFlow's.

| Objax | here | what differs |
| --- | --- | --- |
| Objax2Tf(module) | ``jax2tf.convert`` of ``tether.pure(module)`` | TensorFlow is imported when one is made |
"""

from __future__ import annotations

import contextlib
import functools
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tether._transforms import pure
from tether.compat.objax._errors import MisuseError
from tether.compat.objax.module import Module
from tether.errors import describe
from tether.interop._packages import package

__all__ = ["Objax2Tf"]


class Objax2Tf:
    """A module as a ``tf.Module``, with the values that its variables have now as TensorFlow's variables.

    Its call is a ``tf.function``, whose arguments all become tensors: ``ForceArgs(module, training=False)`` first, if
    the module asks for more.

    Args:
        module: The module.
    Raises:
        MisuseError: it is none.
        ArgumentError: TensorFlow isn't installed.
    """

    def __new__(cls, module: Module) -> Objax2Tf:
        """Makes an object that is a ``tf.Module``, too."""
        if not isinstance(module, Module):
            raise MisuseError(
                "Objax2Tf: Input argument to Objax2Tf must be an Objax module.",
                got=describe(module),
                expected="an objax.Module",
                fix="objax.Function(f, vc)" if callable(module) else None,
            )
        return object.__new__(_class_in(cls))

    def __init__(self, module: Module):
        super().__init__()
        tf, jax2tf = _tensorflow(), package("jax.experimental.jax2tf", "objax.util.Objax2Tf")
        plain = pure(module)
        values = {path: v for path, v in plain.values().items() if not jnp.issubdtype(v.dtype, jax.dtypes.prng_key)}
        self._tf_vars = [tf.Variable(np.asarray(value)) for value in values.values()]

        def call(tensors: list[Any], kwargs: dict[str, Any], *args: Any) -> Any:
            return plain(dict(zip(values, tensors, strict=True)), *args, **kwargs)[0]

        self._tf_call = jax2tf.convert(call)


def _tensorflow() -> Any:
    return package("tensorflow", "objax.util.Objax2Tf")


@functools.cache
def _class_in(cls: type) -> type:
    tf = _tensorflow()
    with contextlib.suppress(RuntimeError):  # TensorFlow has begun, and has its share of the GPU already
        tf.config.experimental.set_visible_devices([], "GPU")

    @functools.partial(tf.function, autograph=False)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._tf_call(self._tf_vars, kwargs, *args)

    return types.new_class(cls.__name__, (cls, tf.Module), exec_body=lambda scope: scope.update(__call__=call))
