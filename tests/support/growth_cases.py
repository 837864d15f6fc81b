"""Cases of the memory contract: every format, every verb and every mechanism that moves bytes differently.

``CASES`` has the calls. A test of the contract prepares a case in a fresh process; ``support.growth`` writes the
checkpoint and measures the call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import sluice
from sluice import rules
from support.growth import EVEN, LARGE, MANY, MIB, MOST, SHAPES, Outcome, Shapes


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One call."""

    #: The checkpoint that it reads; a key of ``growth.FILES``, or empty.
    file: str
    #: Prepares the call and yields, then makes it and yields its outcome. Takes the path of the file, a path for an
    #: output, and the limits of memory.
    call: Callable[..., Iterator[Outcome | None]]
    #: S: bytes of staging.
    staging_bytes: int = 4 * MIB
    #: Bytes of the finished tensors, to check that the table is right about what is new; 0 for what is not checked.
    final_bytes: int = 0
    #: Whether the file is not in the page cache.
    cold: bool = False
    #: Whether CI leaves it out.
    long: bool = False

    def prepare(self, path: str, output: str) -> Iterator[Outcome | None]:
        """Return the call, which is made by ``next``, with everything before it done."""
        running = self.call(path, output, sluice.MemoryLimits(staging=self.staging_bytes))
        next(running)
        return running


def nbytes(shapes: Shapes, item: int = 4) -> int:
    """Return the bytes of tensors of these shapes."""
    return item * sum(torch.Size(shape).numel() for shape in shapes)


def _empty(shapes: Mapping[str, tuple[int, ...]], *, device: str = "meta") -> nn.Module:
    return nn.ParameterDict({name: nn.Parameter(torch.zeros(shape, device=device)) for name, shape in shapes.items()})


def _numbered(shapes: Shapes) -> dict[str, tuple[int, ...]]:
    return {str(number): shape for number, shape in enumerate(shapes)}


def _into(
    path: str,
    _output: str,
    memory: sluice.MemoryLimits,
    *,
    shapes: Mapping[str, tuple[int, ...]],
    live: bool = False,
    readers: int | None = None,
    **how: Any,
) -> Iterator[Outcome | None]:
    model, load_into = _empty(shapes, device="cpu" if live else "meta"), sluice.load_into
    if readers:
        from sluice.planning import planner

        vars(planner)["reader_count"] = lambda reads, *_, **__: min(readers, len(reads))
    yield None
    report = load_into(model, path, memory=memory, **how)
    assert report.measured is not None
    yield Outcome(
        predicted_bytes=report.predicted.total_bytes,
        reported_bytes=report.measured.total_bytes,
        new=tuple if live else model.parameters,
        moved=shapes.values() if live else (),
    )


def _refreshed(path: str, _output: str, memory: sluice.MemoryLimits) -> Iterator[Outcome | None]:
    """Refresh the first tensor, which is most of the file: it is read next to the live one."""
    model = _empty(_ALL, device="cpu")
    state = sluice.load_into(model, path, memory=memory).state
    assert state is not None
    since = replace(state, contents={**state.contents, "0": ""})
    yield None
    report = sluice.refresh(model, path, since=since, memory=memory).report
    assert report is not None
    predicted = report.predicted.total_bytes
    yield Outcome(predicted_bytes=predicted, new=lambda: [model.get_parameter("0")], moved=SHAPES[1:])


def _state_dict(path: str, _output: str, memory: sluice.MemoryLimits) -> Iterator[Outcome | None]:
    load_state_dict = sluice.load_state_dict
    planned = sluice.plan(None, path, memory=memory).predicted.total_bytes
    yield None
    state = load_state_dict(path, memory=memory)
    yield Outcome(predicted_bytes=planned, new=state.values)


def _optimizer(
    path: str,
    _output: str,
    memory: sluice.MemoryLimits,
    *,
    dtype: torch.dtype = torch.float32,
    with_model: bool = False,
) -> Iterator[Outcome | None]:
    """Load the state for parameters of a dtype, or the model and the state from one checkpoint."""
    parameters = _empty(_numbered(EVEN[:8]), device="cpu").to(dtype).parameters()
    optimizer, model = torch.optim.AdamW(parameters), _empty(_ALL if with_model else {})
    warm = torch.optim.AdamW([nn.Parameter(torch.zeros(2, dtype=dtype))])
    warm.load_state_dict(warm.state_dict())  # what torch itself does at first use
    load_into, load_optimizer = sluice.load_into, sluice.load_optimizer

    def loaded() -> list[torch.Tensor]:
        return [*model.parameters(), *(value for state in optimizer.state.values() for value in state.values())]

    yield None
    with sluice.open(path) as checkpoint:
        if with_model:
            load_into(model, checkpoint, key="model", memory=memory)
        report = load_optimizer(optimizer, checkpoint, key="optimizer", memory=memory)
    assert report.measured is not None
    figures = (None, None) if with_model else (report.predicted.total_bytes, report.measured.total_bytes)
    yield Outcome(predicted_bytes=figures[0], reported_bytes=figures[1], new=loaded)


def _pretrained(path: str, _output: str, memory: sluice.MemoryLimits, **how: Any) -> Iterator[Outcome | None]:
    import transformers

    small = transformers.GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=8, n_positions=8)
    transformers.GPT2LMHeadModel(small)  # imports
    from_pretrained, reports = sluice.hf.from_pretrained, list[Any]()
    yield None
    model = from_pretrained(path, memory=memory, report=reports.append, **how)
    yield Outcome(predicted_bytes=reports[0].predicted.total_bytes, new=lambda: [*model.parameters(), *model.buffers()])


def _merged(path: str, output: str, _memory: sluice.MemoryLimits) -> Iterator[Outcome | None]:
    """Merge three inputs with a search for thresholds: 48 MiB besides the staging of a conversion."""
    links = [Path(output, f"{number}.pt") for number in range(3)]
    for link in links:
        link.symlink_to(path)
    merge, memory = sluice.merge, sluice.MemoryLimits(staging=16 * MIB)
    yield None
    weights, parameters = dict.fromkeys(map(str, links[1:]), 0.5), {"density": 0.3}
    merge(weights, Path(output, "f.pt"), method="ties", base=links[0], parameters=parameters, memory=memory)
    yield Outcome(moved=SHAPES)


def _convert(
    path: str, output: str, memory: sluice.MemoryLimits, *, name: str, shapes: Shapes = SHAPES, **how: Any
) -> Iterator[Outcome | None]:
    convert = sluice.convert
    yield None
    convert(path, f"{output}/{name}", memory=memory, **how)
    yield Outcome(moved=shapes, tensor_bytes=1024)


def _save(
    _path: str,
    output: str,
    _memory: sluice.MemoryLimits,
    *,
    name: str,
    make: Callable[[], dict[str, torch.Tensor]],
    **how: Any,
) -> Iterator[Outcome | None]:
    state, save = make(), sluice.save
    yield None
    save(state, f"{output}/{name}", **how)
    yield Outcome(moved=[tuple(tensor.shape) for tensor in state.values()])


# States of 192 MiB, several times what a save may take


def _many() -> dict[str, torch.Tensor]:
    return {f"w{i}": torch.ones(1024, 4096) for i in range(12)} | {"turned": torch.ones(4096, 1024).t()}


def _huge() -> dict[str, torch.Tensor]:
    return {"huge": torch.ones(12, 4096, 1024)}


def _strided() -> dict[str, torch.Tensor]:
    whole = torch.ones(4096, 12288)
    permuted = whole.view(64, 64, 12288).permute(2, 0, 1)
    return {"turned": whole.t(), "every second": whole[::2, 1::2], "permuted": permuted}


def _turned() -> dict[str, torch.Tensor]:
    """Return tensors for a torch file, where views share what they need of a storage."""
    return {"turned": torch.ones(4096, 12288).t(), "conjugate": torch.ones(1024, 12288, dtype=torch.complex64).conj()}


_S = 4 * MIB
_ALL = _numbered(SHAPES)
_F = nbytes(SHAPES)
_DEFAULT = 64 * MIB
_F_EVEN = nbytes(EVEN)


def _load(
    file: str,
    shapes: Mapping[str, tuple[int, ...]] = _ALL,
    *,
    staging: int = _S,
    cold: bool = False,
    long: bool = False,
    item: int = 4,
    **how: Any,
) -> Case:
    """Return a load into a model on meta, whose elements have ``item`` bytes."""
    call, final = partial(_into, shapes=shapes, **how), nbytes(tuple(shapes.values()), item)
    return Case(file=file, call=call, staging_bytes=staging, final_bytes=final, cold=cold, long=long)


#: A load of a file that is large enough for direct reads.
_even = partial(_load, shapes=_numbered(EVEN), staging=_DEFAULT, cold=True)


def _saved(name: str, make: Callable[[], dict[str, torch.Tensor]], *, long: bool = True, **how: Any) -> Case:
    call = partial(_save, name=name, make=make, **how)
    return Case(file="", call=call, staging_bytes=16 * MIB, long=long)


def _written(file: str, name: str, shapes: Shapes = SHAPES, *, long: bool = False, **how: Any) -> Case:
    """Return a conversion."""
    call = partial(_convert, name=name, shapes=shapes, **how)
    return Case(file=file, call=call, staging_bytes=16 * MIB, long=long)


_HALF = "bfloat16"

CASES: dict[str, Case] = {
    # Formats, cached
    "zip": _load("zip.pt"),
    "zip, cast": _load("zip.pt", item=2, dtype=_HALF),
    "legacy": _load("legacy.pt", long=True),
    "legacy, cast": _load("legacy.pt", item=2, dtype=_HALF, long=True),
    "legacy, unaligned": _load("unaligned-legacy.pt", strict=False),
    "safetensors": _load("plain.safetensors", long=True),
    "safetensors, unaligned": _load("unaligned.safetensors"),
    "safetensors, unaligned, cast": _load("unaligned.safetensors", item=2, dtype=_HALF, long=True),
    "gguf": _load("packed.gguf", item=2, dtype=_HALF),
    "gguf, cold": _load("packed.gguf", cold=True, page_cache="bypass", long=True),
    "shards": _load("shards"),
    "parameters": _load("parameters"),
    "distributed": _load("distributed"),
    "distributed, cast": _load("distributed", item=2, dtype=_HALF),
    "training, key": _load("training.pt", key="model"),
    # Cold: direct reads
    "zip, cold": _even("even.pt"),
    "zip, cold, cast": _even("even.pt", item=2, dtype=_HALF),
    "legacy, cold": _even("even-legacy.pt"),
    "legacy, cold, cast": _even("even-legacy.pt", item=2, dtype=_HALF, long=True),
    "legacy, unaligned, cold": _even("even-unaligned-legacy.pt", strict=False),
    "legacy, unaligned, cold, cast": _even("even-unaligned-legacy.pt", strict=False, item=2, dtype=_HALF, long=True),
    "safetensors, unaligned, cold": _load("unaligned.safetensors", cold=True, page_cache="bypass"),
    "shards, cold": _load("shards", cold=True, page_cache="bypass", long=True),
    "distributed, cold": _load("distributed", cold=True, page_cache="bypass", long=True),
    "parameters, cold": _load("parameters", cold=True, page_cache="bypass", long=True),
    # Other numbers of readers: each thread has a heap and a stack
    **{
        f"{count} readers, {file}": _even(file, readers=count, long=count == 2 or file == "even.pt")
        for count in (2, 16)
        for file in ("even.pt", "even-legacy.pt")
    },
    # Verbs and targets
    "live": Case(file="zip.pt", call=partial(_into, shapes=_ALL, live=True)),
    "refresh": Case(file="zip.pt", call=_refreshed, final_bytes=nbytes(SHAPES[:1])),
    "state dict": Case(file="zip.pt", call=_state_dict, final_bytes=_F),
    "state dict, legacy, cold": Case(
        file="even-legacy.pt", call=_state_dict, staging_bytes=_DEFAULT, final_bytes=_F_EVEN, cold=True, long=True
    ),
    "state dict, views": Case(
        file="views.pt", call=_state_dict,  final_bytes=4 * (9216 * 1024 + 4608 * 1024 + 216 * 2048)
    ),
    "optimizer": Case(file="training.pt", call=_optimizer, final_bytes=2 * nbytes(EVEN[:8]) + 8 * 4),
    "optimizer, cast": Case(
        file="training.pt", call=partial(_optimizer, dtype=torch.bfloat16), final_bytes=nbytes(EVEN[:8]) + 8 * 4
    ),
    "model and optimizer": Case(
        file="training.pt", call=partial(_optimizer, with_model=True), final_bytes=_F + 2 * nbytes(EVEN[:8]) + 8 * 4
    ),
    "hf": Case(file="huggingface", call=_pretrained, long=True),
    "hf, cast": Case(file="huggingface", call=partial(_pretrained, dtype=_HALF), long=True),
    "many tensors": _load("many.pt", _numbered(MANY)),
    "100,000 tensors": _load("most.pt", _numbered(MOST), long=True),
    "100,000 tensors, state dict": Case(file="most.pt", call=_state_dict, final_bytes=nbytes(MOST), long=True),
    # Conversions and saves
    "convert torch to safetensors": _written("zip.pt", "f.safetensors", long=True),
    "convert legacy to torch, cast": _written("legacy.pt", "f.pt", dtype=_HALF),
    "convert safetensors to shards": _written(
        "plain.safetensors", "model", format="huggingface", max_shard_size="20MiB"
    ),
    "convert distributed to safetensors": _written("distributed", "f.safetensors"),
    "convert, transposed": _written("even.pt", "f.safetensors", EVEN, rules=[rules.transpose("*")]),
    "convert unaligned to torch": _written("unaligned.safetensors", "f.pt", long=True),
    "convert gguf to safetensors": _written("packed.gguf", "f.safetensors"),
    "convert gguf to torch, transposed": _written("packed.gguf", "f.pt", rules=[rules.transpose("0")], long=True),
    "convert shards to torch": _written("shards", "f.pt", long=True),
    "convert parameters to safetensors": _written("parameters", "f.safetensors", long=True),
    "convert distributed to torch, cast": _written("distributed", "f.pt", dtype=_HALF, long=True),
    "convert large to torch, cast": _written("large.pt", "f.pt", LARGE, dtype=_HALF),
    "convert large to safetensors": _written("large.pt", "f.safetensors", LARGE),
    "convert large to safetensors, transposed": _written(
        "large.pt", "f.safetensors", LARGE, rules=[rules.transpose("*")]
    ),
    "convert large to torch": _written("large.pt", "f.pt", LARGE, long=True),
    "convert large to torch, transposed": _written("large.pt", "f.pt", LARGE, rules=[rules.transpose("*")], long=True),
    "convert large to safetensors, cast": _written("large.pt", "f.safetensors", LARGE, dtype=_HALF, long=True),
    "convert large to shards, cast": _written("large.pt", "model", LARGE, dtype=_HALF, long=True),
    "convert many": _written("many.pt", "f.pt", MANY),
    "convert 100,000 to torch": _written("most.pt", "f.pt", MOST, long=True),
    "convert 100,000 to safetensors": _written("most.pt", "f.safetensors", MOST, long=True),
    "merge": Case(file="zip.pt", call=_merged, staging_bytes=64 * MIB),
    "save torch": _saved("f.pt", _many, long=False),
    "save torch, cast": _saved("f.pt", _many, dtype=_HALF),
    "save torch, one": _saved("f.pt", _huge),
    "save torch, one, cast": _saved("f.pt", _huge, long=False, dtype=_HALF),
    "save torch, views, cast": _saved("f.pt", _turned, dtype=_HALF),
    "save safetensors": _saved("f.safetensors", _many),
    "save safetensors, cast": _saved("f.safetensors", _many, long=False, dtype=_HALF),
    "save safetensors, one": _saved("f.safetensors", _huge),
    "save safetensors, one, cast": _saved("f.safetensors", _huge, dtype=_HALF),
    "save views": _saved("f.safetensors", _strided, long=False),
    "save views, cast": _saved("f.safetensors", _strided, dtype=_HALF),
    "save directory, views": _saved("model", _strided),
    "save directory, one, cast": _saved("model", _huge, dtype=_HALF),
    "save shards": _saved("model", _many, max_shard_size="20MiB"),
}  # fmt: skip


def _add_rules() -> None:
    """Add the rules that move bytes in ways of their own."""
    numbers = [str(number) for number in range(16)]
    turned: dict[str, Any] = {"shapes": {"w": (1024, 9216)}, "rules": [rules.rename("0", "w"), rules.transpose("w")]}
    halves = {"a": (4608, 1024), "b": (4608, 1024)}
    rows, columns = (rules.concatenate(numbers, "w", dim=dim) for dim in (0, 1))
    ruled = partial(_load, "zip.pt", strict=False)
    CASES.update({
        "rule transpose": ruled(**turned),
        "rule transpose, cast": ruled(**turned, item=2, dtype=_HALF, long=True),
        "rule split": ruled(halves, rules=[rules.split("0", ("a", "b"))]),
        "rule scale": ruled({"0": SHAPES[0]}, rules=[rules.scale("0", 0.5)], long=True),
        "rule resize": ruled({"0": (9300, 1024)}, rules=[rules.resize("0", 9300)], long=True),
        "rule concatenate": _load("even.pt", {"w": (16 * 4352, 256)}, rules=[rows], strict=False),
        "rule concatenate columns": _load("even.pt", {"w": (4352, 16 * 256)}, rules=[columns], strict=False),
    })  # fmt: skip


def _add_staging() -> None:
    """Add loads with staging of any size, the smallest of which is less than one tensor."""
    for mib in (1, 7, 256, 1024):
        for page_cache in ("keep", "bypass"):
            how: dict[str, Any] = {"staging": mib * MIB, "page_cache": page_cache}
            CASES[f"staging of {mib} MiB, {page_cache}"] = _load("zip.pt", long=True, **how)
            CASES[f"staging of {mib} MiB, {page_cache}, cast"] = _load(
                "zip.pt", item=2, dtype=_HALF, long=(mib, page_cache) != (1, "bypass"), **how
            )


_add_rules()
_add_staging()


# Deliberate regressions, in cases of which the contract must not hold


def _broken(case: Case, damage: Callable[[], None], *, long: bool) -> Case:
    """Return a case whose process has a defect from before the call on."""

    def call(*arguments: Any) -> Iterator[Outcome | None]:
        running = case.call(*arguments)
        yield next(running)
        damage()
        yield next(running)

    return replace(case, call=call, long=long)


def _hold_a_tensor_twice() -> None:
    from sluice.reading import transfer

    module: Any = transfer
    run, kept = module.run, list[torch.Tensor]()

    def run_and_keep(*arguments: Any, **how: Any) -> Any:
        tensors, result = run(*arguments, **how)
        kept.append(max(tensors, key=torch.Tensor.numel).clone())
        return tensors, result

    module.run = run_and_keep


def _keep_file_pages() -> None:
    from sluice.sources import local

    file: Any = local.LocalFile
    read_into, kept = file.read_into, list[Any]()

    def read_and_map(source: local.LocalFile, *arguments: Any, **how: Any) -> Any:
        if not kept:
            mapping, start = source.map(0, source.identity.nbytes)
            kept.append((mapping, sum(mapping[start::4096])))
        return read_into(source, *arguments, **how)

    file.read_into = read_and_map


#: Cases with a defect that puts the memory above the prediction.
BROKEN: dict[str, Case] = {
    "a tensor held twice": _broken(CASES["zip"], _hold_a_tensor_twice, long=False),
    "a file mapping kept": _broken(CASES["zip"], _keep_file_pages, long=True),
}
