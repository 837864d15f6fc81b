"""``sluice.stream``."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sluice._arguments import check_load, check_model
from sluice._dtypes import DType
from sluice._options import TEXT_ENCODING, Limits, Memory
from sluice._progress import Progress
from sluice._public import explain_keywords, public
from sluice.adapters.config import Adapters
from sluice.checkpoint.open_checkpoint import CheckpointSource, borrow
from sluice.entries.rules import Rule
from sluice.loading.module_request import ModuleRequest
from sluice.matching.renaming import Rename
from sluice.streaming.job import StreamRequest, stream_memory
from sluice.streaming.stream import Stream, open_stream

__all__ = ["stream"]


@public()
@explain_keywords
def stream(
    model: torch.nn.Module,
    source: CheckpointSource,
    *,
    memory: Memory = None,
    device: str | int | torch.device | None = None,
    dtype: DType | None = None,
    key: str | None = None,
    rename: Rename | None = None,
    rules: Sequence[Rule] = (),
    adapters: Adapters | None = None,
    strict: bool = True,
    blocks: Sequence[str] | None = None,
    train: bool = False,
    limits: Limits | None = None,
    encoding: str = TEXT_ENCODING,
    progress: Progress = False,
) -> Stream:
    """Run a model whose weights do not fit into memory: each block's weights are read just before it is called.

    The model is built under ``sluice.empty_init()`` and called as usual. While one block computes,
    the weights of the next are read; they take the memory of those that are not needed any more. As many blocks as fit
    stay in memory, small tensors and buffers always do, and of an embedding only the rows are read that are looked up.

    A block is a member of a list of modules, such as a layer of a transformer, or a module outside of these lists that
    holds parameters. Lists inside a block, such as experts, have blocks of their own, which are read when they are
    called. If calls then read less, or the largest block is too large, each module with parameters is a block.

    Args:
        model: The module, on the meta device. Tensors that have memory are filled and stay.
        source: A checkpoint file or directory, a shard index, a file object, or an open checkpoint; see ``open``.
        memory: Bytes for weights where they are used: a size such as ``"6GiB"``, or ``MemoryLimits``, whose ``host`` or
            ``device`` counts. The staging buffers, and what the model computes, come on top. None takes what the limits
            of the process leave, less a tenth. For a model on an accelerator, ``MemoryLimits(device=, host=)`` also
            gives host memory, staging included, in which weights rest that do not fit on the device.
        device: Where the model runs; None for the CPU, or where its constructor moved it.
        dtype: As in ``load_into``. A cast is made each time that weights are read: convert the file once if possible.
        key: As in ``load_into``.
        rename: As in ``load_into``.
        rules: As in ``load_into``.
        adapters: As in ``load_into``. Weights are merged each time that they are read: with ``convert`` only once.
        strict: As in ``load_into``. Parameters that the checkpoint does not have stay in memory.
        blocks: Names of modules to treat as blocks, with ``*`` for any name, as in ``["layers.*"]``. None finds
            them by the structure of the model.
        train: Whether calls may need gradients. Parameters that require them when the stream begins stay in memory, and
            so do those that are added to the model; frozen ones are read again for the backward pass. Freeze the others
            with ``requires_grad_(False)`` first. Gradients and optimizers need memory of their own.
        limits: Bounds for hostile files.
        encoding: Encoding of text that Python 2 wrote, as in ``torch.load``; see ``open``.
        progress: True draws a bar for what is loaded at the beginning; a function is called with each event.

    Returns:
        The stream, which ends with its ``with`` block or ``close()``; its ``report`` has the figures.

    Raises:
        CheckpointError: The file is damaged, unsafe or of an unknown kind.
        MismatchError: The checkpoint does not fit the module; every reason is listed and nothing was touched.
        BudgetError: The memory is too small for the largest block; the error says what would do.
        StreamError: The model cannot be streamed: it is compiled, streamed already, or holds DTensors. Calls of a
            streamed model raise it if gradients are enabled without ``train``, and so does what needs all weights at
            once: moving, casting, copying and saving the model.
        ReadError: The operating system failed a read; a call of the model raises it too, and may be repeated.
        SourceChangedError: The file changed.

    Example:
        >>> with sluice.empty_init():
        ...     model = GPTModel(config)
        >>> with torch.inference_mode(), sluice.stream(model, "model.pth", memory="6GiB") as stream:
        ...     logits = model(torch.tensor([[1, 2, 3]]))
        >>> print(stream.report)
        streams ... of model.pth (torch-zip) through ... on cpu
        ...
    """
    arguments = locals()
    check_model(model, source, "stream(model, source)")
    limits_of_loads, memory_bytes = stream_memory(memory)
    check_load(**arguments)
    load = ModuleRequest.of({**arguments, "memory": limits_of_loads})
    request = StreamRequest(load=load, memory_bytes=memory_bytes, blocks=blocks, train=train)
    return open_stream(request, borrow(source, limits=limits, encoding=encoding), progress=progress)
