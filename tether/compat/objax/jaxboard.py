# SPDX-License-Identifier: Apache-2.0
"""Summaries for TensorBoard.

| Objax | here | what differs |
| --- | --- | --- |
| Summary, SummaryWriter | on the package tensorboard | it is imported at the first use |
| Reducer, DelayedScalar, Image, Text | the same | nothing |
"""

from __future__ import annotations

import enum
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from tether.compat.objax._errors import MisuseError
from tether.compat.objax.util import image as _image
from tether.errors import describe
from tether.interop._packages import package

__all__ = ["DelayedScalar", "Image", "Reducer", "Summary", "SummaryWriter", "Text"]


class Reducer(enum.Enum):
    """How one number is made of those of a tag: functions of a list."""

    @staticmethod
    def FIRST(x: Any) -> Any:
        """The first of them."""
        return x[0]

    @staticmethod
    def LAST(x: Any) -> Any:
        """The last of them."""
        return x[-1]

    @staticmethod
    def MEAN(x: Any) -> Any:
        """The mean of them."""
        return np.mean(x)


class DelayedScalar:
    """Numbers, of which one is made when it is asked for.

    Args:
        reduce: Makes one of a list.
    """

    def __init__(self, reduce: Callable[[Any], Any]):
        self.values: list[Any] = []
        self.reduce = reduce

    def __call__(self) -> Any:
        """The number."""
        return self.reduce(self.values)


class Image:
    """An image as the contents of a PNG file.

    Args:
        shape: (channels, height, width).
        png: The contents.
    """

    def __init__(self, shape: tuple[int, int, int], png: bytes):
        self.shape = shape
        self.png = png


class Text:
    """A text, in Markdown."""

    def __init__(self, text: str):
        self.text = text


class Summary(dict):
    """Entries by tag, for one step.

    Example:
        >>> summary = objax.jaxboard.Summary()
        >>> for loss in (1.0, 2.0):
        ...     summary.scalar("loss", loss)
        >>> float(summary["loss"]())
        1.5
    """

    def image(self, tag: str, image: Any) -> None:
        """Adds an image, float[channels, height, width] in [-1, 1]."""
        self[tag] = Image(image.shape, _image.to_png(image))

    def scalar(self, tag: str, value: Any, reduce: Callable[[Any], Any] = Reducer.MEAN) -> None:
        """Adds a number to those of a tag; ``reduce`` is that of its first."""
        self.setdefault(tag, DelayedScalar(reduce)).values.append(value)

    def text(self, tag: str, text: str) -> None:
        """Adds a text."""
        self[tag] = Text(text)

    def __call__(self) -> Any:
        """The entries as TensorBoard has them, a ``Summary`` message.

        Raises:
            MisuseError: an entry is none of the three kinds.
            ArgumentError: tensorboard isn't installed.
        """
        proto = package("tensorboard.compat.proto.summary_pb2", "objax.jaxboard.Summary")
        return proto.Summary(value=[_entry(proto, tag, value) for tag, value in self.items()])


def _entry(proto: Any, tag: str, value: Any) -> Any:
    if isinstance(value, DelayedScalar):
        return proto.Summary.Value(tag=tag, simple_value=float(value()))
    if isinstance(value, Image):
        channels, height, width = value.shape
        image = proto.Summary.Image(encoded_image_string=value.png, colorspace=channels, height=height, width=width)
        return proto.Summary.Value(tag=tag, image=image)
    if isinstance(value, Text):
        tensors = package("tensorboard.util.tensor_util", "objax.jaxboard.Summary")
        plugin = proto.SummaryMetadata.PluginData(plugin_name="text")
        return proto.Summary.Value(
            tag=tag,
            metadata=proto.SummaryMetadata(plugin_data=plugin),
            tensor=tensors.make_tensor_proto(values=value.text.encode("utf-8"), shape=(1,)),
        )
    raise MisuseError(
        "jaxboard.Summary: this entry is of no known kind.",
        at=tag,
        got=describe(value),
        expected="a DelayedScalar, an Image or a Text",
        fix=["summary.scalar(tag, value)", "summary.image(tag, image)", "summary.text(tag, text)"],
    )


class SummaryWriter:
    """Writes summaries to an event file, which TensorBoard reads.

    Args:
        logdir: The folder, which is made.
        queue_size: Number of summaries to wait for before they are written.
        write_interval: Seconds to wait for.
    Raises:
        ArgumentError: tensorboard isn't installed.
    """

    def __init__(self, logdir: str, queue_size: int = 5, write_interval: int = 5):
        writers = package("tensorboard.summary.writer.event_file_writer", "objax.jaxboard.SummaryWriter")
        os.makedirs(logdir, exist_ok=True)
        self.writer = writers.EventFileWriter(logdir, queue_size, write_interval)

    def write(self, summary: Summary, step: int) -> None:
        """Adds a summary of a step."""
        proto = package("tensorboard.compat.proto.event_pb2", "objax.jaxboard.SummaryWriter")
        self.writer.add_event(proto.Event(step=int(step), summary=summary(), wall_time=time.time()))

    def close(self) -> None:
        """Writes what waits, and closes the file."""
        self.writer.close()

    def __enter__(self) -> SummaryWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
