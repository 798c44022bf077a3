# SPDX-License-Identifier: Apache-2.0
"""Functions of arrays.

| Objax | here | what differs |
| --- | --- | --- |
| functional.* | core/activation.py, core/ops.py, core/pooling.py | see there |
| functional.divergence, loss, parallel | modules of that name | see there |
"""

from tether.compat.objax.functional import core, divergence, loss, parallel
from tether.compat.objax.functional.core import (
    average_pool_2d,
    batch_to_space2d,
    celu,
    channel_to_space2d,
    dynamic_slice,
    elu,
    flatten,
    interpolate,
    leaky_relu,
    log_sigmoid,
    log_softmax,
    logsumexp,
    max_pool_2d,
    one_hot,
    pad,
    relu,
    rsqrt,
    scan,
    selu,
    sigmoid,
    softmax,
    softplus,
    space_to_batch2d,
    space_to_channel2d,
    stop_gradient,
    swish,
    tanh,
    top_k,
    upsample_2d,
    upscale_nn,
)

__all__ = [
    "average_pool_2d",
    "batch_to_space2d",
    "celu",
    "channel_to_space2d",
    "core",
    "divergence",
    "dynamic_slice",
    "elu",
    "flatten",
    "interpolate",
    "leaky_relu",
    "log_sigmoid",
    "log_softmax",
    "logsumexp",
    "loss",
    "max_pool_2d",
    "one_hot",
    "pad",
    "parallel",
    "relu",
    "rsqrt",
    "scan",
    "selu",
    "sigmoid",
    "softmax",
    "softplus",
    "space_to_batch2d",
    "space_to_channel2d",
    "stop_gradient",
    "swish",
    "tanh",
    "top_k",
    "upsample_2d",
    "upscale_nn",
]
