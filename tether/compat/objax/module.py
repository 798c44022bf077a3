# SPDX-License-Identifier: Apache-2.0
"""Modules: objects with variables, and functions as such.

| Objax | here | what differs |
| --- | --- | --- |
| Module, ModuleList, Function, ForceArgs | _objects.py | see there |
| Jit, Vectorize, Parallel | _jit.py, _vectorize.py, _parallel.py | see there |
"""

from tether.compat.objax._jit import Jit
from tether.compat.objax._objects import ForceArgs, Function, Module, ModuleList
from tether.compat.objax._parallel import Parallel
from tether.compat.objax._vectorize import Vectorize

__all__ = ["ForceArgs", "Function", "Jit", "Module", "ModuleList", "Parallel", "Vectorize"]
