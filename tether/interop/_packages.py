# SPDX-License-Identifier: Apache-2.0
"""The packages that interop speaks to, imported where they are used: the library needs none of them."""

from __future__ import annotations

import importlib
from typing import Any

from tether.errors import ArgumentError


def package(name: str, user: str) -> Any:
    """Imports a package, or says what to install for ``user``.

    Raises:
        ArgumentError: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = name.partition(".")[0]
        if error.name is not None and error.name.partition(".")[0] != missing:
            raise  # the package is there, and lacks one of its own
        raise ArgumentError(
            f"{user}: the package {missing} is not installed.",
            got=f"no module {error.name!r}",
            expected=f"{missing}, which Tether itself doesn't need",
            fix=f"pip install {missing}",
        ) from error
