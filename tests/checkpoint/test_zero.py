"""Checkpoints of DeepSpeed's ZeRO are read as its own zero_to_fp32 reads them."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn

import sluice
from sluice import FormatError, IncompleteCheckpointError, MismatchError, UnsupportedError
from support.directories import assert_same, refusal
from support.oracles import bits
from support.range_server import RangeServer
from support.zero_files import WRITTEN, Change, Training, example, unpacked, write_zero
from tools.write_deepspeed_files import Net as DeepSpeedNet

# Written by DeepSpeed itself


@pytest.mark.parametrize("name", WRITTEN)
def test_weights_equal_those_of_zero_to_fp32(tmp_path: Path, name: str) -> None:
    folder = unpacked(name, tmp_path)
    expected = load_file(folder / "weights.safetensors")
    for place in (folder / "run", folder / "run" / "global_step3"):
        found = dict(sluice.load_state_dict(place))
        if name.startswith("stage-1"):  # zero_to_fp32 leaves frozen parameters out, which the files have
            assert found.keys() - expected.keys() == {"frozen.weight", "frozen.bias"}
        assert_same({key: found[key] for key in expected}, expected)
        assert found["head.weight"].data_ptr() == found["embed.weight"].data_ptr()
        pointers = {tensor.untyped_storage().data_ptr() for tensor in found.values()}
        assert len(pointers) == len(found) - 1  # parameters do not share the memory of a whole vector


@pytest.mark.parametrize("name", WRITTEN)
def test_a_plain_optimizer_resumes(tmp_path: Path, name: str) -> None:
    folder = unpacked(name, tmp_path)
    places = [folder / "run"]
    if "round-robin" not in name:  # ds_to_universal of DeepSpeed 0.19.8 mixes up these parameters
        expected = load_file(folder / "optimizer.safetensors")
        places += [folder / "universal" / "global_step3"] * (folder / "universal").is_dir()
    for place in places:
        model = DeepSpeedNet()
        sluice.load_into(model, place)
        trained = [p for p in model.parameters() if p.requires_grad]
        groups = [{"params": [p for p in trained if p.ndim > 1]}, {"params": [p for p in trained if p.ndim <= 1]}]
        optimizer = torch.optim.AdamW(groups)
        report = sluice.load_optimizer(optimizer, place, model=model)
        assert report.loaded == report.total == 3 * len(trained)
        assert [(g["lr"], g["betas"], g["weight_decay"]) for g in optimizer.param_groups] == [
            (1e-3, (0.8, 0.95), 0.1),
            (2e-3, (0.8, 0.95), 0.0),
        ]
        for key, parameter in model.named_parameters():
            for value in ("exp_avg", "exp_avg_sq") if parameter.requires_grad and "round-robin" not in name else ():
                own = optimizer.state[parameter][value]
                assert own.shape == parameter.shape
                assert bits(own.flatten()) == bits(expected[f"{key}/{value}"].flatten()[: parameter.numel()]), key
        for parameter in trained:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        assert {float(optimizer.state[parameter]["step"]) for parameter in trained} == {4.0}


@pytest.mark.parametrize("name", ["stage-2", "stage-3"])
def test_universal_checkpoints(tmp_path: Path, name: str) -> None:
    place = unpacked(name, tmp_path) / "universal" / "global_step3"
    with sluice.open(place) as checkpoint:
        assert checkpoint.format == "deepspeed-universal"
        assert_same(dict(sluice.load_state_dict(checkpoint)), dict(sluice.load_state_dict(tmp_path / "run")))
    step = {"state": {0: {"step": torch.tensor(3.0)}}} if name == "stage-3" else None
    groups = {"param_groups": [{"lr": 0.1, "params": [0]}], "optimizer_state_dict": step}
    torch.save(groups, place / "zero" / "optimizer_state.pt")
    with pytest.raises(FormatError, match="do not have the vectors of the model states"):
        sluice.load_optimizer(torch.optim.AdamW(DeepSpeedNet().parameters()), place)
    (place / "zero" / "scale" / "fp32.pt").unlink()
    assert "zero/scale/fp32.pt" in str(refusal(place, IncompleteCheckpointError))


# Written by other code than sluice's to the public layout


@pytest.mark.parametrize(
    ("stage", "world", "gap"),
    [(1, 1, 0), (1, 4, 0), (2, 3, 0), (2, 2, 3), (2, 17, 1), (3, 1, 0), (3, 5, 0), (3, 16, 0)],
)
def test_any_number_of_ranks(tmp_path: Path, stage: int, world: int, gap: int) -> None:
    training = example()
    start = "bf16_" if world % 2 else ""
    place = write_zero(tmp_path, training, stage=stage, world=world, gap=gap, start=start)
    expected = training.weights
    if stage == 1:
        expected["frozen"] = expected["frozen"].bfloat16()
    assert_same(dict(sluice.load_state_dict(place)), expected)
    with sluice.open(place) as checkpoint:
        assert checkpoint.format == "deepspeed-zero"
        assert checkpoint.metadata == {"ds_version": "0.19.8", "global_steps": "7", "dp_world_size": str(world)}
        assert list(checkpoint) == list(expected)
        assert torch.equal(checkpoint["conv"][1:, 0, ::2].read(), expected["conv"][1:, 0, ::2])
        assert getattr(checkpoint.tree, "_metadata", None) == ({"": {"version": 1}} if stage != 2 else None)


@given(
    shapes=st.lists(st.lists(st.integers(0, 5), max_size=4).map(tuple), min_size=1, max_size=6),
    stage=st.sampled_from([1, 3]),
    world=st.integers(1, 7),
    gap=st.integers(0, 2),
)
@settings(deadline=None, max_examples=25)
def test_any_shapes(shapes: list[tuple[int, ...]], stage: int, world: int, gap: int) -> None:
    sizes = [prod(shape) for shape in shapes]
    values = torch.split(torch.arange(float(sum(sizes))), sizes)
    training = Training([{f"p{i}": values[i].view(shape) for i, shape in enumerate(shapes)}])
    with tempfile.TemporaryDirectory() as folder:
        place = write_zero(Path(folder), training, stage=stage, world=world, gap=gap if stage == 1 else 0)
        assert_same(dict(sluice.load_state_dict(place)), training.weights)
        optimizer = torch.optim.AdamW([(name, nn.Parameter(value)) for name, value in training.weights.items()])
        sluice.load_optimizer(optimizer, place)
        [group] = optimizer.param_groups
        for name, parameter in zip(group["param_names"], group["params"], strict=True):
            assert torch.equal(optimizer.state[parameter]["exp_avg"], training.state(name, "exp_avg")), name


@pytest.mark.parametrize("stage", [2, 3])
def test_conversion_and_verification(tmp_path: Path, stage: int) -> None:
    training = example()
    place = write_zero(tmp_path / "run", training, stage=stage, world=3)
    sluice.convert(place, tmp_path / "half.safetensors", dtype="bf16")
    halves = load_file(tmp_path / "half.safetensors")
    assert halves.keys() == training.weights.keys() - {"head"}  # which is tied
    assert all(torch.equal(v, training.weights[n].to(v.dtype)) for n, v in halves.items())
    assert {v.dtype for v in halves.values()} == {torch.bfloat16, torch.int64}
    unused = training.state("down", "exp_avg").flatten()[7].numpy().tobytes()  # weights do without it
    path = next(path for path in place.rglob("*optim*.pt") if unused in path.read_bytes())
    path.write_bytes(path.read_bytes().replace(unused, bytes(4)))
    assert not sluice.verify(place).ok


@pytest.mark.parametrize(
    ("stage", "where"), [(1, "/run/"), (3, "/run/"), (2, "/run/checkpoint/"), (3, "/run/checkpoint/")]
)
def test_servers_without_a_listing(tmp_path: Path, stage: int, where: str) -> None:
    """``latest`` and the numbers in the files tell the names of the others."""
    place = write_zero(tmp_path, example(), stage=stage, world=2, tag="checkpoint")  # as Lightning does
    paths = [path for path in place.rglob("*") if path.is_file()]
    with RangeServer({f"/run/{path.relative_to(place).as_posix()}": path.read_bytes() for path in paths}) as server:
        url = server.url(where)
        assert_same(dict(sluice.load_state_dict(url)), dict(sluice.load_state_dict(place)))
        optimizer = named(example())
        assert sluice.load_optimizer(optimizer, url).loaded == 3 * len(optimizer.state) == 15


def test_a_further_name_of_a_further_name(tmp_path: Path) -> None:
    def chained(name: str, content: Any) -> None:
        if "model" in name:
            content["shared_params"] = {"again": "head", "head": "embed"}

    training = example()
    place = write_zero(tmp_path, training, stage=2, world=2, change=chained)
    assert_same(dict(sluice.load_state_dict(place)), training.weights)


# Optimizers


def named(training: Training) -> torch.optim.AdamW:
    groups = [{"params": [(n, nn.Parameter(v.clone())) for n, v in group.items()]} for group in training.groups]
    return torch.optim.AdamW(groups)


def change_states(change: Callable[[dict[str, Any]], None]) -> Change:
    def changed(name: str, content: Any) -> None:
        if "optim" in name:
            change(content["optimizer_state_dict"])

    return changed


def test_steps_counted_by_the_group(tmp_path: Path) -> None:
    """FusedAdam has the step among the options, DeepSpeedCPUAdam as a number."""

    def fused(own: dict[str, Any]) -> None:
        for number, group in enumerate(own["base_optimizer_state"]["param_groups"]):
            del own["base_optimizer_state"]["state"][number]["step"]
            group.update(step=9, bias_correction=True)

    place = write_zero(tmp_path, example(), stage=2, world=2, change=change_states(fused))
    optimizer = named(example())
    sluice.load_optimizer(optimizer, place)
    assert {float(state["step"]) for state in optimizer.state.values()} == {9.0}
    assert "step" not in optimizer.param_groups[0]


def test_state_of_other_forms_is_refused(tmp_path: Path) -> None:
    def factored(own: dict[str, Any]) -> None:
        own["base_optimizer_state"]["state"][0]["row"] = torch.zeros(3)

    place = write_zero(tmp_path, example(), stage=1, world=2, change=change_states(factored))
    sluice.load_state_dict(place)
    with pytest.raises(UnsupportedError, match="not flat like the weights") as caught:
        sluice.load_optimizer(named(example()), place)
    assert caught.value.tensor == "row"


@pytest.mark.parametrize("base", [None, "a list"])
def test_optimizers_without_groups(tmp_path: Path, base: str | None) -> None:
    """Elastic checkpoints of old versions have a list of states."""

    def change(own: dict[str, Any]) -> None:
        state = own.pop("base_optimizer_state")["state"]
        own["base_optimizer_state"] = base and list(state.values())

    place = write_zero(tmp_path, example(), stage=2, world=2, change=change_states(change))
    sluice.load_state_dict(place)
    with pytest.raises(MismatchError, match="no optimizer state"):
        sluice.load_optimizer(named(example()), place)


@pytest.mark.parametrize("other", [{}, {"exp_avg": 0.5, "exp_avg_sq": 0.5}, {"exp_avg": torch.tensor(0.5)}], ids=str)
def test_a_parameter_in_two_vectors_has_one_kind_of_state(tmp_path: Path, other: dict[str, object]) -> None:
    def straddling(own: dict[str, Any]) -> None:
        first, second = own["fp32_flat_groups"]
        own["fp32_flat_groups"] = [first[:-1].clone(), torch.cat([first[-1:], second])]
        states = own["optimizer_state_dict"]["state"]
        states[0] = {key: value[:-1].clone() if value.ndim else value for key, value in states[0].items()}
        states[1] = {"step": states[0]["step"], **other}

    place = write_zero(tmp_path, example(), stage=3, world=2, change=change_states(straddling))
    assert_same(dict(sluice.load_state_dict(place)), example().weights)
    with pytest.raises(FormatError, match="have different states of the optimizer"):
        sluice.load_optimizer(named(example()), place)


def test_state_of_another_dtype_on_one_rank(tmp_path: Path) -> None:
    def changed(name: str, content: Any) -> None:
        if "rank_1_" in name:
            state = content["optimizer_state_dict"]["base_optimizer_state"]["state"][0]
            state["exp_avg"] = state["exp_avg"].int()

    place = write_zero(tmp_path, example(), stage=2, world=2, change=changed)
    with pytest.raises(FormatError, match="different saves: dtype of exp_avg"):
        sluice.load_optimizer(named(example()), place)
