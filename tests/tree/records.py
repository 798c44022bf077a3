# SPDX-License-Identifier: Apache-2.0
"""What NumPy itself leaves in a file of leaves."""

from __future__ import annotations

import io
from typing import Any

import numpy as np


def records(*arrays: Any) -> bytes:
    """One ``np.save`` after the other."""
    file = io.BytesIO()
    for array in arrays:
        np.save(file, array)
    return file.getvalue()
