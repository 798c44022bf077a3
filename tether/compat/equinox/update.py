# SPDX-License-Identifier: Apache-2.0
"""Adding updates to a model.

| Equinox | here | what differs |
| --- | --- | --- |
| apply_updates | ``tether.apply_updates`` | an error has the path |
"""

from __future__ import annotations

from tether.tree import apply_updates

__all__ = ["apply_updates"]
