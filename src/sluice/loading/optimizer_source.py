"""Open the checkpoint that holds the state of an optimizer, which can be one of several files of a directory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from msgspec.structs import replace

from sluice._errors import MismatchError, UnsupportedError
from sluice._messages import SHOWN, section
from sluice._options import TEXT_ENCODING, Limits
from sluice.checkpoint.open_checkpoint import CheckpointSource, OpenCheckpoint, borrow
from sluice.checkpoint.survey import optimizer_files, zero_directory
from sluice.formats.divided import divided_directory
from sluice.loading.optimizer_job import OptimizerRequest
from sluice.sources.opening import find_place

__all__ = ["optimizer_checkpoint"]


@contextmanager
def optimizer_checkpoint(
    request: OptimizerRequest, source: CheckpointSource, *, limits: Limits | None = None, encoding: str = TEXT_ENCODING
) -> Iterator[OpenCheckpoint]:
    """Open the checkpoint of an optimizer for the length of the block.

    In a directory this is the optimizer's file next to the model; of several such files, the only one that fits.

    Args:
        request: The load, which decides which file fits.
        source: As in ``sluice.load_optimizer``.
        limits: Bounds for hostile files.
        encoding: Encoding of text that Python 2 wrote.

    Raises:
        MismatchError: The directory holds the state of several optimizers, and none or more than one of them fits.
        UnsupportedError: It holds a state that was divided over ranks.
    """
    place = source.place if isinstance(source, OpenCheckpoint) else find_place(source)
    listed = place.directory() if place is not None and place.location else None
    names = optimizer_files(listed) if listed else []
    if listed and not names:
        limits, found = limits or Limits(), {entry.name for entry in listed.entries()}
        zero = zero_directory(listed, found, limits, optimizer=True)
        if zero is not None:
            with OpenCheckpoint.of_layout(replace(zero, place=place), limits, encoding) as checkpoint:
                yield checkpoint
            return
    divided = divided_directory(listed) if listed and not names else None
    directory = place.title if place else ""
    files = [place.below(name) for name in names] if place else []
    if divided is not None:
        raise UnsupportedError(f"the directory holds {divided.what}", file=directory, advice=divided.advice)
    with ExitStack() as stack:
        if len(files) < 2:
            yield stack.enter_context(borrow(files[0] if files else source, limits=limits, encoding=encoding))
            return
        outline = request.outline()
        lines, fitting = [], []
        for file in files:
            checkpoint = stack.enter_context(borrow(file, limits=limits, encoding=encoding))
            try:
                request.find(checkpoint, outline)
            except MismatchError as error:
                lines.append(f"{find_place(file).title}: {' '.join(error.problem.split())}")
            else:
                lines.append(f"{find_place(file).title}: fits")
                fitting.append(checkpoint)
        if len(fitting) != 1:
            text = section("choose one", lines[:SHOWN], lines)
            fit = "several of them fit" if fitting else "none of them fits"
            raise MismatchError(f"the directory holds more than one optimizer, and {fit}\n{text}", file=directory)
        yield fitting[0]
