# SPDX-License-Identifier: Apache-2.0
"""Taking trees apart by leaf, and putting them together again.

| Equinox | here | what differs |
| --- | --- | --- |
| is_array, is_array_like | ``tether.is_array``, ``tether.is_array_like`` | typed PRNG keys are arrays |
| is_inexact_array, is_inexact_array_like | Tether's | bfloat16 is inexact in NumPy's arrays too |
| filter, partition | ``tether.filter``, ``tether.partition`` | an error has the path; a selection is a spec too |
| combine | ``tether.combine`` | an error has the path |
"""

from __future__ import annotations

from tether.tree import combine, filter, is_array, is_array_like, is_inexact_array, is_inexact_array_like, partition

__all__ = [
    "combine",
    "filter",
    "is_array",
    "is_array_like",
    "is_inexact_array",
    "is_inexact_array_like",
    "partition",
]
