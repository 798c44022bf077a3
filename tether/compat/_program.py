# SPDX-License-Identifier: Apache-2.0
"""Runs a program that was written for a library that has a home here, unchanged.

By hand and not by ``runpy``, which makes ``sys.argv[0]`` and ``__file__`` the same, adds its frames to tracebacks,
and takes the program out of ``sys.modules`` before what runs at exit.
"""

from __future__ import annotations

import builtins
import functools
import os
import sys
from importlib.machinery import SourceFileLoader
from types import ModuleType, TracebackType
from typing import Any

from tether.compat import _alias

_USAGE = """usage: python -m {home} program.py [arguments]

Runs program.py as python does, with `import {library}` giving {home}."""


def run(library: str, argv: list[str]) -> None:
    """Runs the program that the first argument names; the others are its own."""
    home = f"{__package__}.{library}"
    if argv[:1] in ([], ["-h"], ["--help"]):
        print(_USAGE.format(library=library, home=home), file=sys.stdout if argv else sys.stderr)
        sys.exit(0 if argv else 2)
    path = os.path.abspath(argv[0])
    loader = SourceFileLoader("__main__", path)
    try:
        source = loader.get_data(path)
    except OSError as error:
        print(f"{home}: can't open file {path!r}: [Errno {error.errno}] {error.strerror}", file=sys.stderr)
        sys.exit(2)
    _alias.install(library, home)
    sys.argv[:] = argv
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.realpath(path))
    sys.excepthook = functools.partial(_show, path, sys.excepthook)
    program: Any = ModuleType("__main__")
    program.__file__, program.__loader__, program.__package__, program.__cached__ = path, loader, None, None
    program.__builtins__ = builtins
    sys.modules["__main__"] = program
    exec(loader.source_to_code(source, path), vars(program))


def _show(path: str, show: Any, kind: type[BaseException], error: BaseException, frames: TracebackType | None) -> None:
    """Shows an error from the frame of the program on."""
    while frames is not None and frames.tb_frame.f_code.co_filename != path:
        frames = frames.tb_next
    error.__traceback__ = frames
    show(kind, error, frames)
