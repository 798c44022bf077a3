# SPDX-License-Identifier: Apache-2.0
"""Whole programs that say ``import objax``, run unchanged; the oracle is what plain Python prints."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TRAINING = """
import numpy as np
import jax.numpy as jn
import objax
from objax.util import EasyDict
from objax.functional.loss import mean_squared_error

data = np.arange(8.0, dtype=np.float32).reshape(8, 1)
model = objax.nn.Linear(1, 1)
model.w.assign(jn.zeros((1, 1)))
optimizer = objax.optimizer.Momentum(model.vars())


@objax.Function.with_vars(model.vars())
def loss(x, y):
    return mean_squared_error(model(x), y).mean()


gv = objax.GradValues(loss, model.vars())


@objax.Function.with_vars(model.vars() + optimizer.vars())
def train(x, y):
    g, v = gv(x, y)
    optimizer(lr=0.01, grads=g)
    return v[0]


train = objax.Jit(train)
losses = [float(train(data, 2 * data + 1)) for _ in range(200)]
print(EasyDict(start=losses[0]).start, losses[-1] < 1e-3, round(float(model.w.value[0, 0]), 2))
print(objax.__version__, repr(optimizer))
"""


def run(*words: str | Path, cwd: Path, **env: str) -> tuple[int, str, str]:
    """Exit status, output and errors of Python with these words."""
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3]), **env},
    )
    return done.returncode, done.stdout, done.stderr


def home(*words: str | Path, cwd: Path, **env: str) -> tuple[int, str, str]:
    return run("-m", "tether.compat.objax", *words, cwd=cwd, **env)


def test_a_training(tmp_path: Path):
    (tmp_path / "train.py").write_text(TRAINING)
    # The first loss: the mean of (2 x + 1)^2 over x = 0 ... 7 is 85.
    assert home("train.py", cwd=tmp_path) == (
        0,
        "85.0 True 2.0\n1.8.0 objax.optimizer.Momentum(momentum=0.9, nesterov=False)\n",
        "",
    )


def test_the_modules_are_the_same_objects(tmp_path: Path):
    (tmp_path / "p.py").write_text(
        "import importlib, sys\n"
        "import objax\n"
        "import objax.optimizer.scheduler as scheduler\n"
        "from objax.variable import TrainVar\n"
        "import tether.compat.objax as home\n"
        "import tether.compat.objax.io.ops\n"
        "from objax.io import ops\n"
        "import objax.util\n"
        "assert objax is home and scheduler is home.optimizer.scheduler and TrainVar is home.TrainVar\n"
        "assert ops is home.io.ops and sys.modules['objax.util'] is home.util\n"
        "assert home.__spec__.name == home.__name__ == 'tether.compat.objax'\n"
        "assert importlib.reload(ops) is ops\n"
        "try:\n"
        "    import objax.nonsense\n"
        "except ModuleNotFoundError as error:\n"
        "    print(error, error.name)\n"
    )
    assert home("p.py", cwd=tmp_path) == (0, "No module named 'objax.nonsense' objax.nonsense\n", "")


PLAIN = {
    "surroundings": "import sys, os\n"
    "import beside\n"
    "print(sys.argv, __file__, __name__, sys.path[0], __package__, __spec__, __doc__)\n"
    "print(sys.modules['__main__'].__dict__ is globals(), beside.__file__, os.getcwd())\n",
    "error": "def f(x):\n    return 1 / x\n\n\nf(0)\n",
    "error from another": "try:\n    {}['a']\nexcept KeyError as error:\n    raise ValueError('no a') from error\n",
    "error in a module": "import beside\nbeside.fail()\n",
    "syntax": "x = 1\nif x\n    pass\n",
    "exit": "import sys\nprint('so')\nsys.exit(3)\n",
    "exit with words": "raise SystemExit('no')\n",
    "at exit": "import atexit, pickle\n"
    "class A: pass\n"
    "atexit.register(lambda: print(type(pickle.loads(pickle.dumps(A())))))\n",
    "a hook of its own": "import sys\nsys.excepthook = lambda _, error, tb: print('mine', error)\n1 / 0\n",
    "encoding": "# -*- coding: latin-1 -*-\nprint(len('\xe4'))\n",
}


@pytest.mark.parametrize("name", PLAIN)
def test_as_plain_python(name: str, tmp_path: Path):
    folder = tmp_path / "in here"
    folder.mkdir()
    (folder / "beside.py").write_text("def fail():\n    raise KeyError('beside')\n")
    (folder / "p.py").write_bytes(PLAIN[name].encode("latin-1"))
    words = ("in here/p.py", "-v", "--help", "a b")
    expected = run(*words, cwd=tmp_path, PYTHONDONTWRITEBYTECODE="1")
    assert home(*words, cwd=tmp_path, PYTHONDONTWRITEBYTECODE="1") == expected
    assert expected[1] or expected[2]
    assert sorted(os.listdir(folder)) == ["beside.py", "p.py"]


def test_a_link_to_a_program_finds_what_is_beside_the_program(tmp_path: Path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "beside.py").write_text("print('found')\n")
    (tmp_path / "a" / "p.py").write_text("import beside, sys\nprint(sys.argv)\n")
    (tmp_path / "link.py").symlink_to(tmp_path / "a" / "p.py")
    assert home("link.py", cwd=tmp_path) == run("link.py", cwd=tmp_path) == (0, "found\n['link.py']\n", "")


class TestMistakes:
    def test_no_such_program(self, tmp_path: Path):
        assert home("none.py", "x", cwd=tmp_path) == (
            2,
            "",
            f"tether.compat.objax: can't open file '{tmp_path}/none.py': [Errno 2] No such file or directory\n",
        )

    def test_a_folder(self, tmp_path: Path):
        assert home(".", cwd=tmp_path) == (
            2,
            "",
            f"tether.compat.objax: can't open file '{tmp_path}': [Errno 21] Is a directory\n",
        )

    def test_no_program(self, tmp_path: Path):
        usage = (
            "usage: python -m tether.compat.objax program.py [arguments]\n\n"
            "Runs program.py as python does, with `import objax` giving tether.compat.objax.\n"
        )
        assert home(cwd=tmp_path) == (2, "", usage)
        assert home("--help", cwd=tmp_path) == (0, usage, "")
