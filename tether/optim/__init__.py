# SPDX-License-Identifier: Apache-2.0
"""Optimizers: optax on the trainable Variables of a model."""

from tether.optim._optimizer import Optimizer as Optimizer

__all__ = ["Optimizer"]
