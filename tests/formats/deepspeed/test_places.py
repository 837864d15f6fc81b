"""Files of ranks that contradict each other or themselves: each is refused on opening, with the right error."""

from __future__ import annotations

import argparse
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import sluice
from sluice import CheckpointError, FormatError, LimitError, Limits, MismatchError, UnsupportedError
from support.directories import refusal
from support.zero_files import example, write_zero

#: Changes the content of the file of rank 1, and of a file with the model states.
Change = Callable[[dict[str, Any]], Any]

VECTORS = {2: "single_partition_of_fp32_groups", 3: "fp32_flat_groups"}
BASE = {2: "base_optimizer_state", 3: "optimizer_state_dict"}


def refused(
    folder: Path,
    stage: int,
    change: Change,
    kind: type[CheckpointError] = FormatError,
    *,
    of: str = "1_mp_rank_00_optim",
) -> sluice.SluiceError:
    """Return the error for a checkpoint of which the files with this part of a name were changed."""

    def changed(name: str, content: dict[str, Any]) -> None:
        if of in name:
            change(content["optimizer_state_dict"] if "optim" in name else content)

    return refusal(write_zero(folder, example(), stage=stage, world=2, change=changed), kind)


def grown(own: dict[str, Any], key: str, by: int) -> None:
    vector = own[key][0]
    own[key][0] = torch.cat([vector, torch.zeros(by)]) if by > 0 else vector[:by].clone()


def stepped(own: dict[str, Any], stage: int, step: object) -> None:
    for state in own[BASE[stage]]["state"].values():
        state["step"] = step


RANKS: dict[str, tuple[int, Change, str]] = {
    "number of ranks": (2, lambda own: own.update(partition_count=[4, 4]), "number of ranks"),
    "number of ranks in stage 3": (3, lambda own: own.update(partition_count=3), "number of ranks"),
    "steps": (2, lambda own: stepped(own, 2, torch.tensor(8.0)), "different saves: step"),
    "steps as numbers": (3, lambda own: stepped(own, 3, 8), "different saves: step"),
    "learning rates": (2, lambda own: own[BASE[2]]["param_groups"][0].update(lr=0.5), "groups"),
    "dtypes": (3, lambda own: own[VECTORS[3]].__setitem__(1, own[VECTORS[3]][1].double()), "dtypes"),
    "fewer vectors": (2, lambda own: own[VECTORS[2]].pop(), "does not have a state for each vector"),
    "a longer vector": (2, lambda own: grown(own, VECTORS[2], 8), "do not fit the files of the ranks"),
    "a shorter vector": (2, lambda own: grown(own, VECTORS[2], -9), "do not fit the files of the ranks"),
    "a longer vector in stage 3": (3, lambda own: grown(own, VECTORS[3], 2), "different saves: elements"),
    "another stage": (
        3,
        lambda own: own.update({VECTORS[2]: own.pop(VECTORS[3]), BASE[2]: own.pop(BASE[3])}),
        "different saves: stage",
    ),
    "a matrix": (2, lambda own: own[VECTORS[2]].__setitem__(0, torch.zeros(2, 2)), "not a flat vector"),
    "a strided vector": (3, lambda own: own[VECTORS[3]].__setitem__(0, torch.zeros(80)[::2]), "not a flat vector"),
    "no vector": (2, lambda own: own[VECTORS[2]].__setitem__(0, "w"), "not a flat vector"),
    "no list": (2, lambda own: own.update({VECTORS[2]: {"0": torch.zeros(3)}}), "is not a list"),
    "no ranks": (3, lambda own: own.update(partition_count=0), "no valid number of ranks"),
    "a flag": (3, lambda own: own.update(partition_count=True), "no valid number of ranks"),
    "negative paddings": (2, lambda own: own.update(group_paddings=[-1, 0]), "not a list of numbers"),
    "no groups": (2, lambda own: own[BASE[2]].update(param_groups=[]), "does not have a state for each vector"),
    "a number of groups": (2, lambda own: own[BASE[2]].update(param_groups=3), "is not a list"),
    "a tensor as a number": (
        2,
        lambda own: own[BASE[2]]["param_groups"][0].update(params=[torch.zeros(1)]),
        "not a number",
    ),
}


def test_expert_vectors(tmp_path: Path) -> None:
    error = refused(tmp_path, 2, lambda own: own.update(partition_count=[2, 1]), UnsupportedError, of="optim")
    assert "experts" in error.problem


def shapes(own: dict[str, Any], **changes: object) -> None:
    own["param_shapes"][0].update(changes)


MODELS: dict[str, tuple[int, Change, str]] = {
    "a larger shape": (2, lambda own: shapes(own, conv=(4, 5)), "do not fit the files of the ranks"),
    "a smaller shape": (3, lambda own: shapes(own, conv=(1, 5)), "do not fit the files of the ranks"),
    "another shape of the same size": (2, lambda own: shapes(own, embed=(3, 5)), "does not have the shape"),
    "one more vector": (2, lambda own: own["param_shapes"].append(OrderedDict()), "do not fit the files of the ranks"),
    "a name in two vectors": (2, lambda own: own["param_shapes"][1].update(conv=(1,)), "in two flat vectors"),
    "negative sizes": (2, lambda own: shapes(own, conv=(-6, -5)), "not a name and a shape"),
    "text as a size": (2, lambda own: shapes(own, conv=("6", 5)), "not a name and a shape"),
    "a number as a name": (2, lambda own: own["param_shapes"][0].update({3: (1,)}), "not a name and a shape"),
    "overflowing sizes": (3, lambda own: shapes(own, conv=(2**40, 2**40)), "too many elements"),
    "overflowing sizes of nothing": (3, lambda own: shapes(own, conv=(0, 2**40, 2**40)), "too many elements"),
    "no shapes": (2, lambda own: own.update(param_shapes="conv"), "is not a list"),
    "no module": (3, lambda own: own.update(module=[1]), "is not a dict"),
    "frozen parameters that are too small": (
        3,
        lambda own: own["frozen_param_fragments"].update(frozen=torch.zeros(3)),
        "does not have the shape",
    ),
    "frozen parameters that are transposed": (
        2,
        lambda own: own["frozen_param_shapes"].update(frozen=(5, 4)),
        "does not have the shape",
    ),
}


CHANGES = [(case, "1_mp_rank_00_optim") for case in RANKS.values()] + [(case, "model") for case in MODELS.values()]


@pytest.mark.parametrize(("case", "of"), CHANGES, ids=[*RANKS, *MODELS])
def test_files_that_contradict_themselves(tmp_path: Path, case: tuple[int, Change, str], of: str) -> None:
    stage, change, text = case
    error = refused(tmp_path, stage, change, of=of)
    assert text in error.problem
    assert error.file


def test_model_states_of_two_saves(tmp_path: Path) -> None:
    first = refused(tmp_path / "a", 3, lambda own: own.update(global_steps=6), of="1_mp_rank_00_model")
    assert "different saves: model states" in first.problem
    second = refused(tmp_path / "b", 2, lambda own: own.update(dp_world_size=4), of="model")
    assert (second.expected, second.found) == ("2", "4")

    def widened(own: dict[str, Any]) -> None:
        own["frozen_param_fragments"]["frozen"] = own["frozen_param_fragments"]["frozen"].float()

    assert "different dtypes" in refused(tmp_path / "c", 3, widened, of="1_mp_rank_00_model").problem


def test_parameters_without_vectors(tmp_path: Path) -> None:
    def emptied(own: dict[str, Any]) -> None:
        if "param_shapes" in own:
            own["param_shapes"] = [{"w": (0,)}]
        else:
            own.update(fp32_flat_groups=[], optimizer_state_dict=None)

    assert refused(tmp_path, 3, emptied, of="states").problem.endswith("vectors")


def test_limits(tmp_path: Path) -> None:
    error = refused(tmp_path / "a", 2, lambda own: shapes(own, conv=(1,) * 70), LimitError, of="model")
    assert error.tensor == "conv"
    place = write_zero(tmp_path / "b", example(odd=97), stage=3, world=9)
    for entries in (20, 60):  # ranges, and boxes of ranges
        assert "'entries'" in str(refusal(place, LimitError, limits=Limits(entries=entries)))
    sluice.open(place, limits=Limits(entries=300)).close()


def test_empty_parameters_have_no_ranges(tmp_path: Path) -> None:
    """The product of parameters and ranks costs nothing by itself."""

    def changed(name: str, content: dict[str, Any]) -> None:
        if "model_states" in name:
            content["param_shapes"][0].update((f"p{i}", (0,)) for i in range(2000))

    place = write_zero(tmp_path, example(), stage=3, world=16, change=changed)
    with sluice.open(place) as checkpoint:
        assert checkpoint["p7"].shape == (0,)
        assert len(checkpoint) == 2000 + len(example().weights)


JUNK: list[Any] = [None, True, -1, 2**70, float("nan"), "x", b"x", [], {}, (), [{}], {0: 1}, {"params": [0]}]
JUNK += [torch.zeros(2, 2), torch.zeros(0), torch.zeros(3).to_sparse(), torch.tensor(1), argparse.Namespace(x=1)]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value in a nested object."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in items:
        yield (*path, key)
        yield from places(child, (*path, key))


@given(st.sampled_from([2, 3]), st.integers(0, 3), st.integers(0, 10**6), st.sampled_from(range(len(JUNK))))
@settings(deadline=None, max_examples=60)
def test_any_value_anywhere(stage: int, file: int, place: int, junk: int) -> None:
    """Junk in place of any value is refused with a typed error, or does not matter."""
    written = count()

    def changed(name: str, content: Any) -> None:
        if next(written) == file:
            paths = list(places(content))
            *around, last = paths[place % len(paths)]
            for key in around:
                content = content[key]
            content[last] = JUNK[junk]

    with tempfile.TemporaryDirectory() as folder:
        path = write_zero(Path(folder), example(), stage=stage, world=2, change=changed)
        with suppress(CheckpointError):
            sluice.load_state_dict(path)
        model = nn.ParameterDict({name: value for group in example().groups for name, value in group.items()})
        with suppress(CheckpointError, MismatchError):
            sluice.load_optimizer(torch.optim.AdamW(model.named_parameters()), path)
