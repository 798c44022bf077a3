# SPDX-License-Identifier: Apache-2.0
"""Helpers: arguments, names, images, devices.

| Objax | here | what differs |
| --- | --- | --- |
| util.* | the same functions | errors in words, which are AssertionErrors too where Objax had an assert |
| util.find_used_variables | source and closure, as before | ``Jit(f)`` and the others need it no more |
| util.Objax2Tf | a tf.Module around jax2tf | TensorFlow is imported when one is made |
"""

from tether.compat.objax._arguments import args_indexes, local_kwargs, override_args_kwargs, positional_args_names
from tether.compat.objax._devices import get_local_devices, map_to_device, multi_host_barrier
from tether.compat.objax._names import class_name, re_sign, repr_function
from tether.compat.objax.util import check, image
from tether.compat.objax.util._small import (
    EasyDict,
    Renamer,
    dummy_context_mgr,
    ilog2,
    to_interpolate,
    to_padding,
    to_tuple,
)
from tether.compat.objax.util.objax2tf import Objax2Tf
from tether.compat.objax.util.tracing import find_used_variables

__all__ = [
    "EasyDict",
    "Objax2Tf",
    "Renamer",
    "args_indexes",
    "check",
    "class_name",
    "dummy_context_mgr",
    "find_used_variables",
    "get_local_devices",
    "ilog2",
    "image",
    "local_kwargs",
    "map_to_device",
    "multi_host_barrier",
    "override_args_kwargs",
    "positional_args_names",
    "re_sign",
    "repr_function",
    "to_interpolate",
    "to_padding",
    "to_tuple",
]
