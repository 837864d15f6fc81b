"""``sluice.merge``: merge or average checkpoints, piece by piece."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch

from sluice._arguments import check_load, dtype_argument, path_argument
from sluice._dtypes import DType
from sluice._errors import FormatError
from sluice._options import Limits, Memory
from sluice._progress import Progress
from sluice._public import explain_keywords, public
from sluice._units import counted
from sluice.api.convert import convert
from sluice.api.load import load_into
from sluice.api.save import save_destination
from sluice.checkpoint.open_checkpoint import CheckpointSource, OpenCheckpoint
from sluice.converting.convert import check_destination
from sluice.formats.strict_json import decode_json
from sluice.merging.opening import open_merge
from sluice.merging.recipe import METHODS, config_error, recipe_of
from sluice.reports.load import LoadReport
from sluice.reports.save import SaveReport
from sluice.sources.opening import find_place
from sluice.sources.remote.location import Remote
from sluice.writing.save_formats import CONVERT_FORMATS, ConvertFormat, choose_format

__all__ = ["merge"]

#: Inputs of ``sluice.merge``: a configuration or its file, weights by path, or paths.
MergeConfig: TypeAlias = "str | os.PathLike[str] | Mapping[Any, Any] | Sequence[CheckpointSource]"

#: Names that only a configuration has.
_CONFIG = frozenset({"merge_method", "models", "slices", "modules"})

#: Most bytes of a configuration.
_MOST_BYTES = 1 << 20


@public()
@explain_keywords
def merge(
    config: MergeConfig,
    path_or_into: str | os.PathLike[str] | Remote | torch.nn.Module,
    *,
    method: str | None = None,
    base: CheckpointSource | None = None,
    parameters: Mapping[str, Any] | None = None,
    key: str | None = None,
    dtype: DType | None = None,
    format: ConvertFormat | None = None,  # noqa: A002  (as in ``convert``)
    max_shard_size: int | str | None = None,
    overwrite: bool = False,
    seed: int = 0,
    memory: Memory = None,
    limits: Limits | None = None,
    progress: Progress = False,
    dry_run: bool = False,
) -> SaveReport | LoadReport:
    """Merge or average checkpoints into a file, a directory or a module, with a fixed amount of memory.

    The methods are those of mergekit 0.1.5, with equal bits where no random draw decides: ``"linear"``, ``"slerp"``,
    ``"nuslerp"``, ``"task_arithmetic"``, ``"ties"``, ``"dare_linear"``, ``"dare_ties"``, ``"breadcrumbs"``,
    ``"breadcrumbs_ties"``, ``"model_stock"`` and ``"passthrough"``; ``"swa"`` and ``"ema"`` average as
    ``torch.optim.swa_utils``, and take integers of the last input. Only pieces of each input are in memory at a time;
    ``"nuslerp"`` and ``"model_stock"`` hold one whole tensor of each input. Extra state without tensors and versions
    of modules are those of the first input.

    Args:
        config: ``{"a.pth": 0.3, "b/": 0.7}``, the weight of each input by its path or another source; a
            list of sources, for averages; a configuration as mergekit takes it (``models``, ``slices`` or
            ``modules``), or the path of its YAML or JSON file, with paths relative to the working directory.
        path_or_into: Where the result is written, as in ``convert``; or the module that it fills, as in ``load_into``.
        method: Method for weights or sources; ``"linear"`` by default, and ``"swa"`` for a list.
        base: Base model for weights or sources.
        parameters: Parameters of the method for weights or sources, such as ``{"density": 0.5}``.
        key: Part of each input, such as ``"model_state_dict"``; None for the only state dict in it.
        dtype: Dtype of the result; None for that of the configuration, or of the inputs.
        format: As in ``convert``.
        max_shard_size: As in ``convert``.
        overwrite: As in ``convert``.
        seed: Where the random draws of ``"dare_*"`` begin. They are not those of mergekit.
        memory: As in ``convert`` and ``load_into``.
        limits: Bounds for hostile files.
        progress: True draws a bar; a function is called with each ``ProgressEvent``.
        dry_run: Write nothing; the report lists what would be written.

    Returns:
        The report of the conversion, or of the load.

    Raises:
        FormatError: The configuration is wrong.
        UnsupportedError: The method, or the merging of tokenizers, is not supported.
        MismatchError: The inputs do not have the same tensors, or integers in them differ.
        CheckpointError: An input is damaged, unsafe or of an unknown kind.
        BudgetError: The memory limits cannot be kept.
        ReadError: The operating system failed a read.
        SaveError: The result cannot be written.
        ImportError: A YAML file needs ``pip install 'sluice[merge]'``.

    Example:
        >>> report = sluice.convert("model.pth", "half.pth", dtype=torch.bfloat16)
        >>> report = sluice.merge({"model.pth": 0.3, "half.pth": 0.7}, "average.safetensors")
    """
    check_load(key=key, limits=limits, progress=progress, overwrite=overwrite, dry_run=dry_run)
    sources: dict[str, CheckpointSource] = {}
    recipe = recipe_of(*_configuration(config, method, base, parameters, sources))
    known = [*METHODS[recipe.method].shared, *METHODS[recipe.method].each]
    for name in set(parameters or ()).difference(known):  # configurations of mergekit may have others
        raise config_error(f"{recipe.method!r} has no parameter {name!r}", expected=", ".join(known) or "none")
    opening = partial(open_merge, recipe, sources=sources, key=key, limits=limits, seed=seed)
    title = f"the merge of {counted(len(recipe.models), 'checkpoint')}"
    wanted = dtype_argument(dtype, auto_is_none=True)
    if isinstance(path_or_into, torch.nn.Module):
        if format or max_shard_size or overwrite or dry_run:
            raise ValueError("format, max_shard_size, overwrite and dry_run are for files")
        with opening(title=title) as checkpoint:
            return load_into(path_or_into, checkpoint, dtype=wanted, memory=memory, progress=progress)
    place = save_destination(path_or_into, "path_or_into")
    chosen = choose_format(Path(place.name), format, max_shard_size, CONVERT_FORMATS)

    def check(checkpoint: OpenCheckpoint) -> None:
        if isinstance(place, Path):
            check_destination(checkpoint, place, chosen)

    with opening(title=title, check=check) as checkpoint:
        return convert(
            checkpoint,
            path_or_into,
            format=format,
            dtype=wanted,
            max_shard_size=max_shard_size,
            overwrite=overwrite,
            memory=memory,
            progress=progress,
            dry_run=dry_run,
        )


def _configuration(
    config: MergeConfig,
    method: str | None,
    base: CheckpointSource | None,
    parameters: Mapping[str, Any] | None,
    sources: dict[str, CheckpointSource],
) -> tuple[Mapping[str, Any], str | None]:
    """Return the configuration, and its file if it has one; fill ``sources`` with inputs that are not paths."""

    def named(source: Any) -> str:
        if isinstance(source, (str, os.PathLike)):
            name: str = os.fspath(source)
        else:  # two may be parts of one file, or of two stores
            equal = (each for each, other in sources.items() if isinstance(source, Remote) and other == source)
            name = next(equal, f"{source!r} at {id(source):#x}")
        sources[name] = source
        return name

    if isinstance(config, Mapping) and not _CONFIG & config.keys():
        models = [{"model": named(source), "parameters": {"weight": weight}} for source, weight in config.items()]
    elif isinstance(config, Sequence) and not isinstance(config, str):
        models = [{"model": named(source)} for source in config]
        method = method or "swa"
    else:
        if method is not None or base is not None or parameters is not None:
            raise ValueError("method, base and parameters are for weights or paths; a configuration has its own")
        return (config, None) if isinstance(config, Mapping) else _read(path_argument(config, "config"))
    if not models:
        raise ValueError("a merge needs a checkpoint: config is empty")
    own = {"merge_method": method or "linear", "models": models, "parameters": parameters}
    return own if base is None else {**own, "base_model": named(base)}, None


def _read(path: str) -> tuple[Mapping[str, Any], str]:
    with closing(find_place(path).open_file()) as file:
        if file.identity.nbytes > _MOST_BYTES:
            advice = "Several checkpoints are a list, or weights by path."
            raise FormatError("the configuration of the merge is larger than 1 MiB", file=path, advice=advice)
        content = file.read_at(0, file.identity.nbytes)
    if path.endswith(".json"):
        try:
            found: Any = decode_json(content, dict[str, Any], "the configuration of the merge", path)
        except FormatError as error:
            raise config_error(error.problem, file=path) from error
    else:
        found = _yaml(content, path)
    if not isinstance(found, dict):
        raise config_error("the configuration of the merge is not a mapping", file=path)
    parts: list[Any] = [found]
    for part in parts:  # it grows; an alias counts each time
        parts += part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
        if len(parts) > _MOST_BYTES:
            raise config_error("the configuration of the merge repeats its parts too often", file=path)
    return found, path


def _yaml(content: bytes, path: str) -> Any:
    try:
        import yaml  # an extra
    except ImportError as error:
        raise ImportError("a configuration in YAML needs PyYAML: pip install 'sluice[merge]'") from error
    try:
        return yaml.safe_load(content)
    # PyYAML raises the others too, for scalars that do not fit their tags.
    except (yaml.YAMLError, ValueError, RecursionError, LookupError, AttributeError, TypeError) as error:
        raise config_error(f"the configuration of the merge is not YAML: {error}", file=path) from error
