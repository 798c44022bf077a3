# SPDX-License-Identifier: Apache-2.0
"""A home for code written for Objax 1.8: ``import tether.compat.objax as objax``.

Objax's classes on Tether's Variables and transformations. Each module begins with a table: their name, what it is
here, what differs. A whole program that says ``import objax`` runs unchanged by
``python -m tether.compat.objax program.py``.
"""

from tether.compat.objax import functional, io, jaxboard, nn, optimizer, privacy, random, typing, util
from tether.compat.objax.constants import ConvPadding, Interpolate
from tether.compat.objax.gradient import Grad, GradValues, Hessian, Jacobian
from tether.compat.objax.module import ForceArgs, Function, Jit, Module, ModuleList, Parallel, Vectorize
from tether.compat.objax.variable import BaseState, BaseVar, RandomState, StateVar, TrainRef, TrainVar, VarCollection

__version__ = "1.8.0"

__all__ = [
    "BaseState",
    "BaseVar",
    "ConvPadding",
    "ForceArgs",
    "Function",
    "Grad",
    "GradValues",
    "Hessian",
    "Interpolate",
    "Jacobian",
    "Jit",
    "Module",
    "ModuleList",
    "Parallel",
    "RandomState",
    "StateVar",
    "TrainRef",
    "TrainVar",
    "VarCollection",
    "Vectorize",
    "functional",
    "io",
    "jaxboard",
    "nn",
    "optimizer",
    "privacy",
    "random",
    "typing",
    "util",
]
