# SPDX-License-Identifier: Apache-2.0
"""Optimizers and averages of weights.

| Objax | here | what differs |
| --- | --- | --- |
| SGD, Momentum, Adam, LARS | sgd.py, momentum.py, adam.py, lars.py | see there |
| ExponentialMovingAverage, ExponentialMovingAverageModule | ema.py | see there |
| scheduler | scheduler.py | see there |

All are called with the learning rate first: ``optimizer(lr, gradients)``.
"""

from tether.compat.objax.optimizer import scheduler
from tether.compat.objax.optimizer.adam import Adam
from tether.compat.objax.optimizer.ema import ExponentialMovingAverage, ExponentialMovingAverageModule
from tether.compat.objax.optimizer.lars import LARS
from tether.compat.objax.optimizer.momentum import Momentum
from tether.compat.objax.optimizer.sgd import SGD

__all__ = ["LARS", "SGD", "Adam", "ExponentialMovingAverage", "ExponentialMovingAverageModule", "Momentum", "scheduler"]
