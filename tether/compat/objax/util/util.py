# SPDX-License-Identifier: Apache-2.0
"""Helpers, under the name of Objax's own file.

| Objax | here | what differs |
| --- | --- | --- |
| util.util.* | ``util.*`` | |
"""

from tether.compat.objax._arguments import args_indexes, local_kwargs, override_args_kwargs, positional_args_names
from tether.compat.objax._devices import get_local_devices, map_to_device, multi_host_barrier
from tether.compat.objax._names import class_name, re_sign, repr_function
from tether.compat.objax.util._small import (
    EasyDict,
    Renamer,
    dummy_context_mgr,
    ilog2,
    to_interpolate,
    to_padding,
    to_tuple,
)

__all__ = [
    "EasyDict",
    "Renamer",
    "args_indexes",
    "class_name",
    "dummy_context_mgr",
    "get_local_devices",
    "ilog2",
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
