# SPDX-License-Identifier: Apache-2.0
"""Functions of arrays that ``objax.functional`` has itself.

| Objax | here | what differs |
| --- | --- | --- |
| functional.core.* | activation.py, ops.py, pooling.py | see there |
"""

from tether.compat.objax.functional.core import activation, ops, pooling
from tether.compat.objax.functional.core.activation import (
    celu,
    elu,
    leaky_relu,
    log_sigmoid,
    log_softmax,
    logsumexp,
    relu,
    selu,
    sigmoid,
    softmax,
    softplus,
    swish,
    tanh,
)
from tether.compat.objax.functional.core.ops import (
    dynamic_slice,
    flatten,
    interpolate,
    one_hot,
    pad,
    rsqrt,
    scan,
    stop_gradient,
    top_k,
    upsample_2d,
    upscale_nn,
)
from tether.compat.objax.functional.core.pooling import (
    average_pool_2d,
    batch_to_space2d,
    channel_to_space2d,
    max_pool_2d,
    space_to_batch2d,
    space_to_channel2d,
)

__all__ = [
    "activation",
    "average_pool_2d",
    "batch_to_space2d",
    "celu",
    "channel_to_space2d",
    "dynamic_slice",
    "elu",
    "flatten",
    "interpolate",
    "leaky_relu",
    "log_sigmoid",
    "log_softmax",
    "logsumexp",
    "max_pool_2d",
    "one_hot",
    "ops",
    "pad",
    "pooling",
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
