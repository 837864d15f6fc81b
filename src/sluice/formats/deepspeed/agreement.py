"""Contradictions between the files of a DeepSpeed checkpoint, which are then from different saves. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sluice._errors import FormatError, UnsupportedError
from sluice.entries.tree import map_leaves
from sluice.formats.deepspeed.states import ModelStates, RankStates, is_flat
from sluice.records import Entry

__all__ = ["check_agreement", "check_state", "other_save"]


def check_agreement(models: Sequence[ModelStates], ranks: Sequence[RankStates]) -> None:
    """Check that the files are of one save: what does not depend on the rank is equal."""
    for model in models:
        if (model.shapes, model.facts) != (models[0].shapes, models[0].facts):
            raise other_save(model.file, "model states", models[0].facts, model.facts)
        if model.world not in {0, len(ranks)}:
            raise other_save(model.file, "dp_world_size", len(ranks), model.world)
    first = _of_all_ranks(ranks[0])
    for rank in ranks:
        own = _of_all_ranks(rank)
        for name, value in first.items():
            if own[name] != value:
                raise other_save(rank.file, name, value, own[name])


def _of_all_ranks(rank: RankStates) -> dict[str, object]:
    lengths = [vector.numel for vector in rank.vectors]
    return {
        "number of ranks": rank.world,
        "stage": 3 if rank.by_parameter else "1 or 2",
        "dtypes": [vector.dtype for vector in rank.vectors],
        "elements": lengths if rank.by_parameter else len(lengths),
        "paddings": rank.gaps,
        "groups": map_leaves(list(rank.options), lambda _: None),
    }


def check_state(rank: RankStates, vector: int, known: Mapping[str, object]) -> None:
    """Check that the state of a vector has the values that another rank has, as long as the vector."""
    if rank.states[vector].keys() != known.keys():
        expected, found = sorted(map(str, known)), sorted(map(str, rank.states[vector]))
        problem = "the ranks have different states of the optimizer"
        raise FormatError(problem, file=rank.file, expected=expected, found=found)
    count = rank.vectors[vector].numel
    padded = count + (rank.paddings[vector] if vector < len(rank.paddings) else 0)
    for key, value in rank.states[vector].items():
        own = known[key]
        if not isinstance(own, Entry) or not own.shape or key == "step":
            continue  # the value of one rank counts
        if not is_flat(value) or len(value.shape) != 1 or not count <= value.numel <= padded:
            raise UnsupportedError(
                "state of the optimizer that is not flat like the weights",
                file=rank.file,
                tensor=str(key),
                expected=f"{count} or {padded} elements",
                found=str(getattr(value, "shape", value))[:200],
                advice="Only DeepSpeed can resume this optimizer.",
            )
        if value.dtype != own.dtype:
            raise other_save(rank.file, f"dtype of {key}", own.dtype, value.dtype)


def other_save(file: str, what: str, expected: object, found: object) -> FormatError:
    """Return the error for a file that contradicts those of other ranks in ``what``."""
    problem = f"the files of the ranks are from different saves: {what}"
    advice = "Delete the files of the other save, or copy the directory again from where it was written."
    return FormatError(problem, file=file, expected=str(expected)[:200], found=str(found)[:200], advice=advice)
