# SPDX-License-Identifier: Apache-2.0
"""A folder of the last few files of variables.

| Objax | here | what differs |
| --- | --- | --- |
| Checkpoint | the same folder and names | files whose name is no number stay, and aren't read |
"""

from __future__ import annotations

import contextlib
import glob
import os
from collections.abc import Callable
from typing import Any

from tether.compat.objax._errors import MisuseError
from tether.compat.objax.io.ops import load_var_collection, save_var_collection
from tether.compat.objax.variable import VarCollection
from tether.errors import describe

__all__ = ["Checkpoint"]


class Checkpoint:
    """Saves variables in files ``logdir/ckpt/0000000123.npz``, and restores them.

    Args:
        logdir: The folder.
        keep_ckpts: How many files to keep, the last ones; 0 for all.
        makedir: Whether to make the folders.
        verbose: Whether to say what is restored.
    Raises:
        MisuseError: what is to be saved or restored is no VarCollection.
    """

    DIR_NAME: str = "ckpt"
    FILE_MATCH: str = "*.npz"
    FILE_FORMAT: str = "%010d.npz"
    LOAD_FN: Callable[..., Any] = staticmethod(load_var_collection)
    SAVE_FN: Callable[..., Any] = staticmethod(save_var_collection)

    def __init__(self, logdir: str, keep_ckpts: int, makedir: bool = True, verbose: bool = True):
        if keep_ckpts < 0:
            raise MisuseError(
                "Checkpoint: keep_ckpts is negative.", got=repr(keep_ckpts), expected="a number of files, or 0 for all"
            )
        self.logdir = logdir
        self.keep_ckpts = keep_ckpts
        self.verbose = verbose
        if makedir:
            os.makedirs(os.path.join(logdir, self.DIR_NAME), exist_ok=True)

    @staticmethod
    def checkpoint_idx(filename: str) -> int:
        """The number in the name of a file."""
        return int(os.path.basename(filename).split(".")[0])

    def restore(self, vc: VarCollection, idx: int | None = None) -> tuple[int, str]:
        """Loads the variables from the file of a number, else from that of the highest.

        Returns:
            The number and the file; ``(0, '')`` if there is none.
        """
        _check(vc, "restore")
        if idx is None:
            idx = max(self._files(), default=None)
        if idx is None:
            self._say("No checkpoints found. Skipping restoring variables.")
            return 0, ""
        file = self._file(idx)
        self._say("Resuming from", file)
        self.LOAD_FN(file, vc)
        return idx, file

    def save(self, vc: VarCollection, idx: int) -> None:
        """Saves the variables under a number, and removes the files before the last ``keep_ckpts``."""
        _check(vc, "save")
        self.SAVE_FN(self._file(idx), vc)
        for _, file in sorted(self._files().items())[: -self.keep_ckpts]:
            os.remove(file)

    def _file(self, idx: int) -> str:
        return os.path.join(self.logdir, self.DIR_NAME, self.FILE_FORMAT % idx)

    def _files(self) -> dict[int, str]:
        found = {}
        for file in glob.glob(os.path.join(glob.escape(self.logdir), self.DIR_NAME, self.FILE_MATCH)):
            with contextlib.suppress(ValueError):
                found[self.checkpoint_idx(file)] = file
        return found

    def _say(self, *words: str) -> None:
        if self.verbose:
            print(*words)


def _check(vc: Any, verb: str) -> None:
    if not isinstance(vc, VarCollection):
        raise MisuseError(
            f"Must pass a VarCollection to {verb}; received type {type(vc)}.",
            got=describe(vc),
            expected="a VarCollection",
            fix="module.vars()" if hasattr(vc, "vars") else None,
        )
