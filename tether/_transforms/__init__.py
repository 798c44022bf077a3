# SPDX-License-Identifier: Apache-2.0
"""The transformations, one file each: the only place that calls JAX's."""

from tether._transforms._checkify import checkify as checkify
from tether._transforms._checkpoint import checkpoint as checkpoint
from tether._transforms._checkpoint import remat as remat
from tether._transforms._cond import cond as cond
from tether._transforms._cond import switch as switch
from tether._transforms._custom_jvp import custom_jvp as custom_jvp
from tether._transforms._custom_vjp import custom_vjp as custom_vjp
from tether._transforms._error_if import branched_error_if as branched_error_if
from tether._transforms._error_if import error_if as error_if
from tether._transforms._eval_shape import eval_shape as eval_shape
from tether._transforms._explain import explain as explain
from tether._transforms._grad import grad as grad
from tether._transforms._grad import value_and_grad as value_and_grad
from tether._transforms._jacobian import hessian as hessian
from tether._transforms._jacobian import jacfwd as jacfwd
from tether._transforms._jacobian import jacrev as jacrev
from tether._transforms._jit import jit as jit
from tether._transforms._loops import fori_loop as fori_loop
from tether._transforms._loops import while_loop as while_loop
from tether._transforms._make_jaxpr import make_jaxpr as make_jaxpr
from tether._transforms._map import map as map
from tether._transforms._pure import pure as pure
from tether._transforms._pure import uses as uses
from tether._transforms._scan import scan as scan
from tether._transforms._shard_map import shard_map as shard_map
from tether._transforms._vjp import jvp as jvp
from tether._transforms._vjp import linearize as linearize
from tether._transforms._vjp import vjp as vjp
from tether._transforms._vmap import vmap as vmap
