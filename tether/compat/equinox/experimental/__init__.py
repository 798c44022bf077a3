# SPDX-License-Identifier: Apache-2.0
"""State that Equinox kept by itself, and removed."""

from tether.compat.equinox.experimental.batch_norm import BatchNorm
from tether.compat.equinox.experimental.spectral_norm import SpectralNorm
from tether.compat.equinox.experimental.stateful import StateIndex, get_state, set_state

__all__ = ["BatchNorm", "SpectralNorm", "StateIndex", "get_state", "set_state"]
