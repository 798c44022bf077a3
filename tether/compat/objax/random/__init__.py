# SPDX-License-Identifier: Apache-2.0
"""Random numbers.

| Objax | here | what differs |
| --- | --- | --- |
| random.* | random/random.py | see there |
"""

from tether.compat.objax.random.random import (
    DEFAULT_GENERATOR,
    Generator,
    normal,
    randint,
    truncated_normal,
    uniform,
)

__all__ = ["DEFAULT_GENERATOR", "Generator", "normal", "randint", "truncated_normal", "uniform"]
