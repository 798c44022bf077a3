# SPDX-License-Identifier: Apache-2.0
"""Files of variables.

| Objax | here | what differs |
| --- | --- | --- |
| load_var_collection, save_var_collection | ops.py | see there |
| Checkpoint | checkpoint.py | see there |

The files are Objax's, both ways.
"""

from tether.compat.objax.io.checkpoint import Checkpoint
from tether.compat.objax.io.ops import load_var_collection, save_var_collection

__all__ = ["Checkpoint", "load_var_collection", "save_var_collection"]
