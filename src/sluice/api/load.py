"""``sluice.load_into`` and ``sluice.load_state_dict``."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from sluice._arguments import check_load, check_model, dtype_argument, memory_limits
from sluice._dtypes import DType
from sluice._options import TEXT_ENCODING, Limits, LoadPlace, Memory, PageCache, Share, TransferOptions
from sluice._progress import Progress
from sluice._public import explain_keywords, public
from sluice.adapters.config import Adapters
from sluice.api.shared import load_shared
from sluice.checkpoint.open_checkpoint import CheckpointSource, OpenCheckpoint, borrow
from sluice.entries.rules import Rule
from sluice.loading.devices import Device
from sluice.loading.job import decide, run
from sluice.loading.load import load
from sluice.loading.module_request import ModuleRequest
from sluice.loading.state_dict import StateDictRequest
from sluice.matching.renaming import Rename
from sluice.modules.unloaded import refuse_streamed, refusing
from sluice.reports.load import LoadReport
from sluice.sharing.copies import SharedCopy

__all__ = ["load_into", "load_state_dict"]


@public()
@explain_keywords
def load_into(
    model: torch.nn.Module,
    source: CheckpointSource,
    *,
    device: Device = None,
    dtype: DType | None = None,
    key: str | None = None,
    rename: Rename | None = None,
    rules: Sequence[Rule] = (),
    strict: bool = True,
    allow_empty: bool = False,
    ignore_mismatched: bool = False,
    place: LoadPlace = "copy",
    quantize: object = None,
    adapters: Adapters | None = None,
    memory: Memory = None,
    limits: Limits | None = None,
    encoding: str = TEXT_ENCODING,
    progress: Progress = False,
    page_cache: PageCache = "auto",
    share: Share = "auto",
) -> LoadReport:
    """Fill a module with the weights of a checkpoint: peak memory = the finished model + the staging buffers.

    A module built under ``sluice.empty_init()`` is either loaded or untouched. In a module with real parameters those
    of the right device and dtype are filled in place; the others get new memory, one tensor at a time. Tied
    parameters stay one object, parameters stay the objects that an optimizer holds, hooks and modes survive.

    Args:
        model: The module. None of its tensors is on the meta device afterwards.
        source: A checkpoint file or directory, a shard index, a file object, or an open checkpoint; see ``open``.
        device: Device of the tensors. None keeps the device of each and puts tensors on meta
            where their constructor moved them under ``empty_init``, otherwise on the CPU. A mapping from
            prefixes of names to devices places parts: ``{"": "cuda:0", "head": "cuda:1"}``; the longest prefix wins.
            ``"auto"`` fills accelerators in order, up to ``memory.device`` or what they have free, and leaves the rest
            to the CPU; modules that share a tensor stay together, and ``report.placement`` has the result.
        dtype: None keeps the module's dtypes, as ``load_state_dict`` does; ``"auto"`` takes the checkpoint's; a dtype
            applies to real floating-point tensors that come from the checkpoint. ``torch.bfloat16``, ``"bfloat16"``,
            ``"torch.bfloat16"`` and ``"bf16"`` are the same; so are ``"half"``, ``"fp16"`` and ``"float16"``.
        key: Part of the checkpoint: a path into the nested object or a dotted prefix of names
            (``load_into(model.trf_blocks[0], f, key="trf_blocks.0")``). None finds the state dict that fits the module.
        rename: New names for those of the checkpoint, after ``key``: a mapping of names or of patterns, as ``--rename``
            takes them (``{"backbone.**": "encoder.**", "head.*": None}``), ``(regular expression, replacement)`` pairs
            for ``re.sub``, or a function. None or an empty new name drops a tensor. What matches no name is an error.
        rules: Changes to the tensors before they are matched, by their new names: transposed, split, joined, cast;
            see ``sluice.rules``.
        strict: Whether missing and unexpected names are errors. If not, live parameters without an entry keep their
            values, and those on meta are initialised by their module's ``reset_parameters``.
        allow_empty: With ``strict=False``, accept a checkpoint that has no tensor of the module at all; otherwise that
            is an error. A module without parameters and persistent buffers needs nothing and is always accepted.
        ignore_mismatched: Accept names of a different shape, as of a head for other classes: live tensors keep their
            values, those on meta are initialised by their module's ``reset_parameters``, and the report lists
            them. Other missing and unexpected names stay errors if ``strict``.
        place: ``"copy"`` gives every tensor memory of its own. ``"map"`` makes those that go to the CPU unchanged pages
            of the file: ready at once, shared between processes, loaded when touched, copied when written to. The rest
            is copied, and the report has the reasons. The file must not change while the model is in use. ``"shared"``
            maps a finished copy that all processes of the host share: see ``shared``, which takes the same ``dtype``,
            ``key``, ``rename`` and ``rules``. A source that ``shared`` returned is always mapped.
        quantize: A configuration of torchao, such as ``Int8WeightOnlyConfig()``, ``"bitsandbytes"`` for the layers of
            that library, or a function that quantizes the modules of a model in place: each weight is quantized when
            its last byte has arrived, with the result of ``quantize_`` on the loaded model. The model is on the meta
            device; each weight is quantized on the device where it stays.
        adapters: Adapters to merge while the weights are read, with the bits of ``merge_and_unload`` of peft 0.21: the
            path or URL of a directory of peft or of a file of peft, kohya, diffusers or ComfyUI, a ``sluice.Adapter``
            with a weight, or a list of them, merged in order. Every tensor of an adapter is used, or is an error.
            They are merged on the host and in the dtype of the load, before weights are quantized.
        memory: How much memory may grow, and the size of the staging buffers; or one size such as ``"2GiB"``, for
            host memory.
        limits: Bounds for hostile files.
        encoding: Encoding of text that Python 2 wrote, as in ``torch.load``; see ``open``.
        progress: True draws a bar; a function is called with each ``ProgressEvent``.
        page_cache: ``"auto"`` bypasses the page cache for data that is not in it, ``"keep"`` leaves the file cached
            for the next load, ``"bypass"`` leaves nothing in the cache.
        share: For a model of DTensors: who reads bytes that several ranks need. ``"auto"`` and ``"none"``: each of
            them. Ranks of one host fetch remote files once with ``sluice.Remote(source, cache=directory)``.

    Returns:
        How many of the module's tensors came from the checkpoint, reads and their methods, missing, tied and cast
        tensors, and predicted and measured memory.

    Raises:
        CheckpointError: The file is damaged, unsafe or of an unknown kind.
        MismatchError: The checkpoint does not fit the module; every reason is listed and nothing was touched.
        BudgetError: The memory limits cannot be kept; nothing was read.
        ValueError: A device cannot be used, a prefix names neither a module nor a tensor of the model, or an argument
            has none of its accepted values.
        TypeError: An argument has a wrong type, such as a class for the model.
        ReadError: The operating system failed a read.
        SourceChangedError: The file changed during the load.
        PartialLoadError: One of the above, after live tensors began to change.
        StreamError: The module is streamed.
        RankError: The model has DTensors, and one of their ranks raised any of the above, or ended.

    Example:
        >>> with sluice.empty_init():
        ...     model = GPTModel(config)
        >>> report = sluice.load_into(model, "model.pth", dtype=torch.bfloat16)
        >>> print(report)
        loaded ... of ... tensors of the model from model.pth (torch-zip), ... on cpu
        ...
    """
    arguments = dict(locals())  # a copy: a tracer adds later variables to the dict of locals()
    check_model(model, source, "load_into(model, source)")
    check_load(**arguments)
    refuse_streamed(model, "be loaded into")
    if place == "shared" or isinstance(source, SharedCopy):
        return load_shared(load_into, **arguments)
    request = ModuleRequest.of(arguments)
    opening: AbstractContextManager[OpenCheckpoint] = borrow(source, limits=limits, encoding=encoding)
    with refusing(model), request.opened(opening) as (opened, _):
        return load(request, opened, progress=progress)


@public()
@explain_keywords
def load_state_dict(
    source: CheckpointSource,
    *,
    device: str | int | torch.device | None = "cpu",
    dtype: DType | None = None,
    key: str | None = None,
    rules: Sequence[Rule] = (),
    memory: Memory = None,
    limits: Limits | None = None,
    encoding: str = TEXT_ENCODING,
    progress: Progress = False,
    page_cache: PageCache = "auto",
) -> OrderedDict[str, Any]:
    """Load a state dict as ``torch.load(weights_only=True)`` does, with peak memory = its tensors + the buffers.

    Tensors that share storage in the file share it in the result, if their dtypes are equal; Parameters come back as
    Parameters, sparse and quantized tensors as such; Python attributes of tensors, other values and ``_metadata`` are
    kept. Of each storage only the bytes that its tensors need are read and held.

    Args:
        source: A checkpoint file or directory, a shard index, a file object, or an open checkpoint; see ``open``.
        device: Device of the tensors; None is the CPU.
        dtype: Cast real floating-point tensors to this, written as in ``load_into``; None keeps the file's dtypes.
        key: Part of the checkpoint. None takes the checkpoint itself if it is a flat state dict, otherwise the only
            candidate inside.
        rules: Changes to the tensors, see ``sluice.rules``; the result is flat then, and other values are kept.
        memory: How much memory may grow, and the size of the staging buffers; or one size such as ``"2GiB"``, for
            host memory.
        limits: Bounds for hostile files.
        encoding: Encoding of text that Python 2 wrote, as in ``torch.load``; see ``open``.
        progress: True draws a bar; a function is called with each ``ProgressEvent``.
        page_cache: As in ``load_into``.

    Raises:
        CheckpointError: The file is damaged, unsafe or of an unknown kind.
        MismatchError: There is no state dict, or more than one; the message lists them.
        BudgetError: The memory limits cannot be kept; nothing was read.
        ReadError: The operating system failed a read.
        SourceChangedError: The file changed during the load.

    Example:
        >>> state_dict = sluice.load_state_dict("model.pth", dtype=torch.bfloat16)
    """
    check_load(key=key, limits=limits, rules=rules, page_cache=page_cache, progress=progress)
    request = StateDictRequest(
        device="cpu" if device is None else device,
        dtype=dtype_argument(dtype, auto_is_none=True),
        key=key,
        rules=rules,
        options=TransferOptions(memory=memory_limits(memory), page_cache=page_cache),
    )
    with borrow(source, limits=limits, encoding=encoding) as checkpoint:
        state_dict: OrderedDict[str, Any] = run(decide(request, checkpoint), progress=progress).value
    return state_dict
