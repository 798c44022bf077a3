# SPDX-License-Identifier: Apache-2.0
"""Training that keeps examples private.

| Objax | here | what differs |
| --- | --- | --- |
| privacy.dpsgd | dpsgd/ | see there |
"""

from tether.compat.objax.privacy import dpsgd

__all__ = ["dpsgd"]
