# SPDX-License-Identifier: Apache-2.0
"""Weights and modules of other libraries: their packages are imported where they are used, none is needed."""

from tether.interop import equinox as equinox
from tether.interop import torch as torch

__all__ = ["equinox", "torch"]
