# SPDX-License-Identifier: Apache-2.0
"""Whether a value may be assigned to a variable.

| Objax | here | what differs |
| --- | --- | --- |
| assert_assigned_type_and_shape_match | the same rule | the error says what was there and what came |
"""

from tether.compat.objax._check import assert_assigned_type_and_shape_match

__all__ = ["assert_assigned_type_and_shape_match"]
