# SPDX-License-Identifier: Apache-2.0
"""The transformations, one file each: the only place that calls JAX's."""

from tether._transforms._checkpoint import checkpoint as checkpoint
from tether._transforms._checkpoint import remat as remat
from tether._transforms._eval_shape import eval_shape as eval_shape
from tether._transforms._grad import grad as grad
from tether._transforms._grad import value_and_grad as value_and_grad
from tether._transforms._jit import jit as jit
from tether._transforms._pure import pure as pure
from tether._transforms._pure import uses as uses
from tether._transforms._vmap import vmap as vmap
