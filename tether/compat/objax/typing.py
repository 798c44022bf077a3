# SPDX-License-Identifier: Apache-2.0
"""Types in signatures.

| Objax | here | what differs |
| --- | --- | --- |
| FileOrStr, JaxArray, JaxDType, ConvPaddingInt | the same | JaxDType is what JAX takes as a dtype |
"""

from __future__ import annotations

from typing import IO, BinaryIO, Union

import jax
from jax.typing import DTypeLike

__all__ = ["FileOrStr", "JaxArray", "JaxDType"]

ConvPaddingInt = Union[int, tuple[int, int], tuple[tuple[int, int], tuple[int, int]]]  # noqa: UP007  (as printed)
FileOrStr = Union[str, IO[BinaryIO]]  # type: ignore[type-var]  # noqa: UP007
JaxArray = jax.Array
JaxDType = DTypeLike
