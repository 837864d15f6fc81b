"""``sluice.load_optimizer``; a module of its own, because most loads do without an optimizer."""

from __future__ import annotations

import torch

from sluice._arguments import check_load, check_model, check_optimizer, memory_limits
from sluice._options import TEXT_ENCODING, Limits, Memory, TransferOptions
from sluice._progress import Progress
from sluice._public import explain_keywords, public
from sluice.checkpoint.open_checkpoint import CheckpointSource
from sluice.loading.load import load
from sluice.loading.optimizer_job import OptimizerRequest, optimizer_checkpoint
from sluice.matching.renaming import Rename
from sluice.reports.load import LoadReport

__all__ = ["load_optimizer"]


@public()
@explain_keywords
def load_optimizer(
    optimizer: torch.optim.Optimizer,
    source: CheckpointSource,
    *,
    model: torch.nn.Module | None = None,
    key: str | None = None,
    rename: Rename | None = None,
    device: str | int | torch.device | None = None,
    memory: Memory = None,
    limits: Limits | None = None,
    encoding: str = TEXT_ENCODING,
    progress: Progress = False,
) -> LoadReport:
    """Fill an optimizer with the state of a checkpoint, as ``optimizer.load_state_dict`` would: without a second copy.

    Each tensor is read straight to its final device and in its final dtype, which are torch's choice: floating-point
    parameters decide for their state, ``step`` keeps its own dtype unless ``fused`` or ``capturable`` says otherwise.
    ``optimizer.load_state_dict`` itself installs the state at the end: until then the optimizer is unchanged.

    Args:
        optimizer: Made of the parameters of the model, in as many groups as in the checkpoint. Load the model first.
        source: As in ``load_into``. In a directory, an ``optimizer.pt`` or ``optimizer.bin`` next to the model is read;
            of several (``optimizer_1.bin``) the only one that fits. An open checkpoint that was also passed to
            ``load_into`` is indexed once. A directory of DeepSpeed's ZeRO holds both.
        model: Names the parameters, if the checkpoint has state by name (torch.distributed.checkpoint, FSDP, ZeRO). An
            optimizer made of ``named_parameters()`` does not need it, nor does numbered state.
        key: Part of the checkpoint, such as ``"optimizer"``. None finds the only state that fits.
        rename: New names for the parameters of a state by name, as in ``load_into``; None for a name leaves it out.
        device: Device of the state until the first ``step``, which moves it to the parameters. None reads it to the
            devices of the parameters.
        memory: How much memory may grow, as in ``load_into``.
        limits: Bounds for hostile files.
        encoding: Encoding of text that Python 2 wrote, as in ``torch.load``; see ``open``.
        progress: True draws a bar; a function is called with each ``ProgressEvent``.

    Returns:
        Reads and their methods, the key of the state, and predicted and measured memory.

    Raises:
        CheckpointError: The file is damaged, unsafe or of an unknown kind. ``UnsupportedError`` if the state was
            divided over ranks (Megatron, flat parameters of FSDP1), with advice.
        MismatchError: No state, or more than one, fits the optimizer; every reason or candidate is listed.
        BudgetError: The memory limits cannot be kept; nothing was read.
        ValueError: The device cannot be used.
        TypeError: An argument has a wrong type, such as a module for the optimizer.
        ReadError: The operating system failed a read.
        SourceChangedError: The file changed during the load.
        RankError: Other ranks failed or called something else.

    Example:
        >>> with sluice.open("run.pt") as checkpoint:
        ...     weights = sluice.load_into(model, checkpoint)
        ...     optimizer = torch.optim.AdamW(model.parameters())
        ...     state = sluice.load_optimizer(optimizer, checkpoint)
        ...     scheduler.load_state_dict(checkpoint.tree["scheduler"])
    """
    check_optimizer(optimizer, source)
    check_model(model, source, "load_optimizer(optimizer, source, model=model)", optional=True)
    check_load(key=key, limits=limits, rename=rename, progress=progress)
    request = OptimizerRequest(
        optimizer=optimizer,
        model=model,
        key=key,
        rename=rename,
        device=device,
        options=TransferOptions(memory=memory_limits(memory)),
    )
    return load(request, optimizer_checkpoint(request, source, limits=limits, encoding=encoding), progress=progress)
