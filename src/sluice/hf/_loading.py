"""``from_pretrained`` and ``stream``: Hugging Face models from local directories and the hub.

It follows the steps of transformers' ``from_pretrained``, with sluice reading the weights:

1. The configuration comes from ``config.json``, the class from its ``architectures``. Both are looked up in the
   registry of transformers, so that no code named in a file is imported.
2. The model is built under ``empty_init`` in the requested dtype, without initialization and without ties.
3. The library's key conversions run on the names, and on symbolic tensors if they merge, split or reorder weights. The
   results are entries that are read directly into place. A conversion that computes is refused.
4. With a ``distributed_config`` the library divides the parameters, still without memory, over the ranks.
5. The library ties weights that the checkpoint has once, sluice fills the model as in ``load_into``, and the library
   computes the buffers that no checkpoint holds and, without ``strict``, missing weights.

Private functions of transformers are imported in ``_hub`` only.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from typing import Any

import torch

from sluice._arguments import check_load, memory_limits
from sluice._dtypes import DType, parse_dtype, torch_dtype
from sluice._errors import UnsupportedError
from sluice._options import Limits, Memory, PageCache, Place, TransferOptions
from sluice._progress import Progress
from sluice._public import explain_keywords, public
from sluice.adapters.config import Adapters, adapter_list
from sluice.api.checkpoint import open as open_checkpoint
from sluice.checkpoint.open_checkpoint import OpenCheckpoint
from sluice.entries import tree as trees
from sluice.hf._configuration import class_and_config, find_quantizer, prepare_ranks, settle_dtype
from sluice.hf._hub import find_library, find_model
from sluice.hf._matching import MatchedWeights, apply_dtype_plan, check, make_real, missing_if_mismatched, tie
from sluice.hf._quantization import Quantizer
from sluice.loading.devices import Device
from sluice.loading.load import load
from sluice.loading.module_request import EntriesRequest
from sluice.modules.empty_init import empty_init
from sluice.records import UnsupportedValue
from sluice.reports.load import LoadReport
from sluice.streaming.job import StreamRequest, stream_memory
from sluice.streaming.stream import Stream, open_stream

__all__ = ["from_pretrained", "stream"]

# ruff: noqa: SLF001  the functions of the library's loader are private; the supported versions are pinned


@public("sluice.hf")
@explain_keywords
def from_pretrained(
    directory: str | os.PathLike[str],
    model_class: type | None = None,
    *,
    revision: str | None = None,
    config: Any = None,
    device: Device = None,
    dtype: DType = "auto",
    attn_implementation: str | None = None,
    experts_implementation: str | None = None,
    distributed_config: Any = None,
    tp_plan: Any = None,
    quantization_config: Any = None,
    adapters: Adapters | None = None,
    strict: bool = True,
    allow_empty: bool = False,
    ignore_mismatched: bool = False,
    place: Place = "copy",
    memory: Memory = None,
    limits: Limits | None = None,
    progress: Progress = False,
    page_cache: PageCache = "auto",
    report: Callable[[LoadReport], object] | None = None,
) -> Any:
    """Load a Hugging Face model, bit-identical to the result of transformers' ``from_pretrained``.

    Args:
        directory: A local directory with ``config.json`` and weights, as ``save_pretrained`` writes it, or the name of
            a model of the hub, such as ``"org/name"``: it is read from ``hf://org/name``, all files of one commit.
        model_class: A model class of transformers, an ``AutoModel...`` class, or None for the one that ``config.json``
            names.
        revision: Branch, tag or commit of a model of the hub; None for its main branch.
        config: A configuration to use instead of the one in the directory; it is copied.
        device: Device of the tensors, as in ``sluice.load_into``; None is the CPU.
        dtype: A dtype or its name, or ``"auto"`` for the dtype in ``config.json`` or, if it names none, that of the
            first floating-point tensor. Modules that the library keeps in float32 keep it.
        attn_implementation: Passed to the library: ``"eager"``, ``"sdpa"``, ...
        experts_implementation: Passed to the library.
        distributed_config: A ``DistributedConfig`` of the library, or a dict of its options: the model is divided over
            the ranks of the process group, and each rank reads only what it holds. Every rank makes the call.
        tp_plan: Short for ``DistributedConfig(tp_plan=tp_plan)``, as in older code: ``"auto"`` or a dict.
        quantization_config: A ``TorchAoConfig`` or ``BitsAndBytesConfig`` of the library: each weight that it selects
            is quantized when its last byte has arrived, on its device.
        adapters: Adapters to merge, as in ``sluice.load_into``.
        strict: Whether missing and unexpected weights are errors. If not, the library initializes missing weights, and
            unexpected ones are ignored.
        allow_empty: With ``strict=False``, accept a checkpoint that has no weight of the model at all.
        ignore_mismatched: Accept weights of a different shape, such as those of a head for other classes: the library
            initializes the model's, and the report lists them.
        place: ``"copy"`` or ``"map"``, as in ``sluice.load_into``.
        memory: How much memory may grow, as in ``sluice.load_into``.
        limits: Bounds for hostile files.
        progress: True draws a progress bar; a function is called with each ``ProgressEvent``.
        page_cache: As in ``sluice.load_into``.
        report: Called with the ``LoadReport``.

    Returns:
        The model, in evaluation mode.

    Raises:
        ImportError: transformers is not installed, or its version is not supported.
        UnsupportedError: The architecture or a required feature is not supported; the message names it.
        MismatchError: Checkpoint and model disagree; every reason is listed.
        MissingFileError: There is no such directory or model, or it has no ``config.json``.
        CheckpointError: A file is damaged or unsafe.
        BudgetError: The memory limits cannot be kept; nothing was read.
        ReadError: The directory or a file cannot be read; a ``RemoteError`` if the hub does not answer.
        SourceChangedError: A file changed during the load.
        RankError: Other ranks failed or called something else.
        ValueError: A local directory was given a revision.

    Example:
        >>> model = sluice.hf.from_pretrained("gpt2-xl", dtype=torch.bfloat16, report=print)
    """
    arguments, started = locals(), time.perf_counter()
    library = find_library()
    check_load(**arguments)
    if place not in {"copy", "map"}:
        raise ValueError(f"place={place!r} is for sluice.load_into; place='map' shares the pages of the files")
    merged = adapter_list(adapters)
    options = TransferOptions(memory=memory_limits(memory), page_cache=page_cache, place=place)
    dtype = _parsed(dtype)
    with find_model(directory, revision, limits) as files:
        path = files.folder
        model_class, config = class_and_config(library, files, model_class, config, limits=limits)
        _choose(config, attn_implementation, experts_implementation)
        ranks = prepare_ranks(library, model_class, distributed_config, tp_plan)
        if ranks is not None:
            config.distributed_config, own_device, meshes = ranks
            device = own_device if device is None else device
        quantizer = find_quantizer(library, config, quantization_config, path, divided=ranks is not None)
        with ExitStack() as stack:
            checkpoint: OpenCheckpoint = stack.enter_context(open_checkpoint(files.weights, limits=limits))
            chosen = settle_dtype(config, dtype, checkpoint, path)
            model = _build(library, model_class, config, chosen, quantizer, path)
            checkpoint = stack.enter_context(quantizer.opened(model, checkpoint))
            _refuse_unsupported(checkpoint, path)
            names = MatchedWeights.of(library, model, checkpoint.entries, path)
            quantizer.matched(model, names)
            if ignore_mismatched:
                missing_if_mismatched(model, names)
            apply_dtype_plan(model, chosen, names.entries)
            if ranks is not None:
                model = type(model).maybe_distribute_model(model, config.distributed_config, meshes)
            notes = tie(model, names, checkpoint)
            check(model, names, strict=strict, allow_empty=allow_empty)
            make_real(model, names.missing)
            quantize = quantizer.function(model)
            request = EntriesRequest(
                model=model, entries=names.entries, device=device, quantize=quantize, adapters=merged, options=options
            )
            loaded = load(request, nullcontext(checkpoint), progress=progress)
        _finish(model, names)  # of a model that is assembled again
    quantizer.finish(model)
    if report is not None:
        report(_reported(loaded, names, notes, time.perf_counter() - started))
    return model


@public("sluice.hf")
@explain_keywords
def stream(
    directory: str | os.PathLike[str],
    model_class: type | None = None,
    *,
    memory: Memory = None,
    revision: str | None = None,
    config: Any = None,
    device: str | int | torch.device | None = None,
    dtype: DType = "auto",
    attn_implementation: str | None = None,
    blocks: Sequence[str] | None = None,
    train: bool = False,
    limits: Limits | None = None,
    progress: Progress = False,
) -> Stream:
    """Run a Hugging Face model whose weights do not fit into memory: ``from_pretrained`` and ``sluice.stream`` in one.

    Args:
        directory: As in ``from_pretrained``.
        model_class: As in ``from_pretrained``.
        memory: Bytes for weights, as in ``sluice.stream``.
        revision: As in ``from_pretrained``.
        config: As in ``from_pretrained``.
        device: Where the model runs; None for the CPU.
        dtype: As in ``from_pretrained``.
        attn_implementation: As in ``from_pretrained``.
        blocks: As in ``sluice.stream``.
        train: As in ``sluice.stream``; every parameter of the model is frozen, so that adapters can be added to it.
        limits: Bounds for hostile files.
        progress: As in ``sluice.stream``.

    Returns:
        The stream; its ``model`` is the model, in evaluation mode.

    Raises:
        StreamError: The model cannot be streamed.
        UnsupportedError: As for ``from_pretrained``, and for models with quantized weights.
        CheckpointError: As for ``from_pretrained``.
        BudgetError: The memory is too small for the largest block.

    Example:
        >>> with torch.inference_mode(), sluice.hf.stream("gpt2-xl", memory="6GiB") as stream:
        ...     logits = stream.model(torch.tensor([[1, 2, 3]])).logits
    """
    library = find_library()
    check_load(limits=limits, progress=progress, blocks=blocks)
    kept, memory_bytes = stream_memory(memory)
    options = TransferOptions(memory=memory_limits(kept))
    dtype = _parsed(dtype)
    with find_model(directory, revision, limits) as files, ExitStack() as stack:
        model_class, config = class_and_config(library, files, model_class, config, limits=limits)
        _choose(config, attn_implementation, None)
        if getattr(config, "quantization_config", None) is not None:
            raise UnsupportedError("models with quantized weights are loaded, not streamed", file=files.name)
        checkpoint = stack.enter_context(open_checkpoint(files.weights, limits=limits))
        chosen = settle_dtype(config, dtype, checkpoint, files.folder)
        model = _build(library, model_class, config, chosen, Quantizer(), files.folder)
        _refuse_unsupported(checkpoint, files.folder)
        names = MatchedWeights.of(library, model, checkpoint.entries, files.folder)
        apply_dtype_plan(model, chosen, names.entries)
        tie(model, names, checkpoint)
        check(model, names, strict=True, allow_empty=False)
        make_real(model, names.missing)
        _finish(model, names)
        filling = EntriesRequest(model=model, entries=names.entries, device=device, options=options)
        if train:
            model.requires_grad_(False)
        request = StreamRequest(load=filling, memory_bytes=memory_bytes, blocks=blocks, train=train)
        stack.pop_all()  # the stream closes the checkpoint
        return open_stream(request, checkpoint, progress=progress)
    raise AssertionError("no exception is suppressed")


def _choose(config: Any, attention: str | None, experts: str | None) -> None:
    """Set the implementations that the caller chose."""
    if attention is not None:
        config._attn_implementation = attention
    if experts is not None:
        config._experts_implementation = experts


def _parsed(dtype: DType) -> DType:
    """Return the argument, with a name as the dtype."""
    named = parse_dtype(dtype, floats_only=True)
    return dtype if named == "auto" else torch_dtype(named)


def _refuse_unsupported(checkpoint: OpenCheckpoint, path: str) -> None:
    """Refuse tensors of kinds that sluice does not read, also those of other names: the conversions may need them."""
    for name, leaf in trees.opaques(checkpoint.index.tree).items():
        if isinstance(leaf, UnsupportedValue):
            raise trees.refusal(leaf, name, path)


def _reported(loaded: LoadReport, names: MatchedWeights, notes: Sequence[str], seconds: float) -> LoadReport:
    """Return the report of a load, with what the library did besides."""
    initialised = tuple(sorted(names.missing))
    return replace(
        loaded,
        missing=tuple(name for name in initialised if name not in names.mismatched),
        initialised=initialised,
        mismatched=names.mismatched,
        unexpected=tuple(names.unexpected),
        seconds=seconds,
        notes=(*loaded.notes, *notes),
    )


def _build(library: Any, model_class: Any, config: Any, dtype: torch.dtype, quantizer: Quantizer, path: str) -> Any:
    """Build the model without weights, ties or initial values.

    Raises:
        UnsupportedError: Its constructor fails, or its settings for generation are damaged.
    """
    with ExitStack() as stack:
        stack.enter_context(library.local_torch_dtype(dtype, model_class.__name__))
        stack.enter_context(library.no_tie_weights())
        stack.enter_context(library.apply_patches())
        stack.enter_context(library.no_init_weights())
        stack.enter_context(empty_init())
        try:
            model = model_class(config)
        except Exception as error:  # constructors may raise anything for an unexpected configuration
            problem = f"{model_class.__name__} cannot be built from the configuration: {error}"
            raise UnsupportedError(problem, file=config.name_or_path) from error
        library.patch_output_recorders(model)
        quantizer.prepare_model(model, dtype)
    if model.can_generate() and hasattr(model, "adjust_generation_fn"):
        nothing = dict.fromkeys(("cache_dir", "proxies", "token", "revision"))
        local = {"force_download": False, "local_files_only": True, "subfolder": "", "trust_remote_code": False}
        try:
            model.adjust_generation_fn(None, False, None, path, **nothing, **local)
        except Exception as error:  # as above
            problem = f"transformers cannot read generation_config.json: {error}"
            raise UnsupportedError(problem, file=path, advice="Correct or remove that file.") from error
    return model


def _finish(model: Any, names: MatchedWeights) -> None:
    """Do the library's work after the weights are loaded."""
    for parameter in model.parameters():  # also those frozen by a constructor: the library recreates them
        parameter.requires_grad_(parameter.is_floating_point())
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name not in names.missing:
            vars(tensor)["_is_hf_initialized"] = True  # excludes it from the library's initialization
    model.initialize_weights()
    model._weight_conversions = names.used
    model.eval()
    model.set_use_kernels(False, None)
