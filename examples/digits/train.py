# SPDX-License-Identifier: Apache-2.0
"""Trains a convolutional network on real handwritten digits, from beginning to end.

The data are the 1,797 images of 8×8 pixels that come with scikit-learn; nothing is downloaded. A fifth of them,
360, is held out by a fixed split (stratified, seed 0). The same people wrote both parts, so the held-out accuracy
says how well other digits of *these* writers are read.
"""

import argparse
import time
from pathlib import Path

try:
    from matplotlib.figure import Figure
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split
except ImportError as error:
    module = (error.name or "a package").partition(".")[0]
    raise SystemExit(
        f"The demo needs {'scikit-learn' if module == 'sklearn' else module}, which is not installed: {error}\n"
        "  fix:      python -m pip install scikit-learn matplotlib   (or run `make demo`, which does it by itself)"
    ) from None

import jax
import jax.numpy as jnp
import numpy as np
import optax
from model import DigitNet
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import tether

RUNS = Path(__file__).resolve().parents[2] / "runs" / "digits"


def digits() -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
    """The two parts of the data, (images, labels) each, standardized by the pixels of the training part."""
    images, labels = load_digits(return_X_y=True)
    images = images.reshape(-1, 1, 8, 8).astype(np.float32)
    x, x_held, y, y_held = train_test_split(images, labels, test_size=360, stratify=labels, random_state=0)
    mean, std = x.mean(), x.std()
    as_data = lambda x, y: (jnp.asarray((x - mean) / std), jnp.asarray(y, jnp.int32))
    return as_data(x, y), as_data(x_held, y_held)


def cross_entropy(logits: jax.Array, y: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


# The step changes the model and the optimizer in place: weights, running statistics, moments of Adam, the stream of
# random keys behind dropout. None of them is listed anywhere. Their old buffers are reused for the new values.
@tether.jit(donate_state=True)
def step(model, optimizer, x, y):
    loss, grads = tether.value_and_grad(lambda model: cross_entropy(model(x), y))(model)
    optimizer.update(grads)
    return loss


@tether.jit
def evaluate(model, x, y):
    """Loss and accuracy in evaluation mode: running statistics, no dropout."""
    logits = model(x, training=False)
    return cross_entropy(logits, y), jnp.mean(logits.argmax(-1) == y)


def batches(x, y, size, rng):
    """One epoch in random order. The few images that don't fill a batch are left out, so every batch has one shape."""
    order = rng.permutation(len(x))
    for start in range(0, len(x) - size + 1, size):
        index = order[start : start + size]
        yield x[index], y[index]


def draw(history: np.ndarray, path: Path) -> None:
    """Learning curves; ``history`` has a row (loss, accuracy, held-out loss, held-out accuracy) for each epoch."""
    epochs = np.arange(1, len(history) + 1)
    figure = Figure(figsize=(10, 4), layout="constrained")  # without pyplot: it draws by Agg, and needs no display
    axes = figure.subplots(1, 2)
    for axis, column, name in ((axes[0], 0, "cross entropy"), (axes[1], 1, "accuracy")):
        axis.plot(epochs, history[:, column], marker=".", color="#4477AA", label="training")
        axis.plot(epochs, history[:, column + 2], marker=".", color="#EE6677", label="held out")
        axis.set(xlabel="epoch", ylabel=name, title=f"{name}, in evaluation mode")
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.grid(alpha=0.3)
        axis.legend()
    axes[0].set_yscale("log")
    axes[1].set_ylim(top=1.001)
    figure.suptitle(f"scikit-learn digits: {history[-1, 3]:.2%} of 360 held-out images right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Trains a convolutional network on scikit-learn's handwritten digits.")
    parser.add_argument("--epochs", type=int, default=15, help="passes over the training data (%(default)s)")
    parser.add_argument("--batch", type=int, default=64, help="images in a step (%(default)s)")
    parser.add_argument("--rate", type=float, default=5e-3, help="highest learning rate (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights, dropout and order (%(default)s)")
    parser.add_argument("--out", type=Path, default=RUNS, help="folder of the learning curves (runs/digits)")
    given = parser.parse_args()
    if given.epochs < 1 or not 2 <= given.batch <= 1437:
        parser.error("--epochs is at least 1, and --batch lies between 2 and 1437, the number of training images")
    return given


def main() -> None:
    args = options()
    console = Console(highlight=False)
    (x, y), (x_held, y_held) = digits()
    tether.seed(args.seed)
    rng = np.random.default_rng(args.seed)

    model = DigitNet()
    steps = len(x) // args.batch
    schedule = optax.cosine_decay_schedule(args.rate, args.epochs * steps)
    optimizer = tether.Optimizer(model, optax.adamw(schedule, weight_decay=1e-3))
    params = sum(variable.value.size for variable in tether.variables(model, tether.Param).values())
    console.print(f"{len(x)} training images, {len(x_held)} held out; {params:,} parameters on {jax.devices()[0]}\n")
    console.print("epoch  training: loss  accuracy   held out: loss  accuracy")

    history = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    start = time.perf_counter()
    # Where the output is no terminal there is no bar, and the table is all there is to see.
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("training", total=args.epochs * steps)
        for epoch in range(1, args.epochs + 1):
            for batch in batches(x, y, args.batch, rng):
                step(model, optimizer, *batch)
                progress.advance(bar)
            history.append([float(number) for number in (*evaluate(model, x, y), *evaluate(model, x_held, y_held))])
            console.print("{:5d}  {:14.4f}  {:8.4f}   {:14.4f}  {:8.4f}".format(epoch, *history[-1]))
    seconds = time.perf_counter() - start

    picture = args.out / "curves.png"
    draw(np.asarray(history), picture)
    console.print(f"\nlearning curves: {picture}", soft_wrap=True)
    console.print(f"step compiled {step.traces} time(s), evaluate {evaluate.traces} (once for each of two sizes)")
    console.print(f"held-out accuracy {history[-1][3]:.4f} after {args.epochs} epochs in {seconds:.1f} s")


if __name__ == "__main__":
    main()
