# SPDX-License-Identifier: Apache-2.0
"""A home for code written for Equinox 0.9: ``import tether.compat.equinox as eqx``.

Equinox's names, with ``equinox.experimental``'s implicit state on Tether's Variables. Each module begins with a
table: their name, what it is here, what differs. A whole program that says ``import equinox`` runs unchanged by
``python -m tether.compat.equinox program.py``.
"""

from tether.compat.equinox import experimental, nn
from tether.compat.equinox.callback import filter_pure_callback
from tether.compat.equinox.custom import filter_custom_jvp, filter_custom_vjp
from tether.compat.equinox.eval_shape import filter_eval_shape
from tether.compat.equinox.filters import (
    combine,
    filter,
    is_array,
    is_array_like,
    is_inexact_array,
    is_inexact_array_like,
    partition,
)
from tether.compat.equinox.grad import (
    filter_closure_convert,
    filter_grad,
    filter_jvp,
    filter_value_and_grad,
    filter_vjp,
)
from tether.compat.equinox.jit import filter_jit
from tether.compat.equinox.make_jaxpr import filter_make_jaxpr
from tether.compat.equinox.module import Module, static_field
from tether.compat.equinox.pretty_print import tree_pformat
from tether.compat.equinox.serialisation import (
    default_deserialise_filter_spec,
    default_serialise_filter_spec,
    tree_deserialise_leaves,
    tree_serialise_leaves,
)
from tether.compat.equinox.tree import tree_at, tree_equal, tree_inference
from tether.compat.equinox.update import apply_updates
from tether.compat.equinox.vmap_pmap import filter_pmap, filter_vmap

__version__ = "0.9.2"

__all__ = [
    "Module",
    "apply_updates",
    "combine",
    "default_deserialise_filter_spec",
    "default_serialise_filter_spec",
    "experimental",
    "filter",
    "filter_closure_convert",
    "filter_custom_jvp",
    "filter_custom_vjp",
    "filter_eval_shape",
    "filter_grad",
    "filter_jit",
    "filter_jvp",
    "filter_make_jaxpr",
    "filter_pmap",
    "filter_pure_callback",
    "filter_value_and_grad",
    "filter_vjp",
    "filter_vmap",
    "is_array",
    "is_array_like",
    "is_inexact_array",
    "is_inexact_array_like",
    "nn",
    "partition",
    "static_field",
    "tree_at",
    "tree_deserialise_leaves",
    "tree_equal",
    "tree_inference",
    "tree_pformat",
    "tree_serialise_leaves",
]
