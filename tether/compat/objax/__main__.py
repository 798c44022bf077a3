# SPDX-License-Identifier: Apache-2.0
"""Runs a program that was written for Objax, unchanged: ``python -m tether.compat.objax program.py [arguments]``.

| Objax | here | what differs |
| --- | --- | --- |
| ``python program.py`` | the same, where ``import objax`` means this package | |
"""

from __future__ import annotations

import sys

from tether.compat import _program

if __name__ == "__main__":
    _program.run("objax", sys.argv[1:])
