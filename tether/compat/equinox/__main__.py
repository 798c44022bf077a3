# SPDX-License-Identifier: Apache-2.0
"""Runs a program that was written for Equinox, unchanged: ``python -m tether.compat.equinox program.py [arguments]``.

| Equinox | here | what differs |
| --- | --- | --- |
| ``python program.py`` | the same, where ``import equinox`` means this package | |
"""

from __future__ import annotations

import sys

from tether.compat import _program

if __name__ == "__main__":
    _program.run("equinox", sys.argv[1:])
