"""Missing and unexpected names: reported together, kept, or initialised."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import sluice
from support.trained_net import empty, problem


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.lm_head = nn.Linear(4, 7, bias=False)
        self.register_buffer("mask", torch.ones(3, 3).tril())


def test_every_kind_of_problem_is_in_one_error_with_close_matches() -> None:
    state = Model().state_dict()
    state["output.weight"] = state.pop("lm_head.weight")
    state["body.0.biases"] = state.pop("body.0.bias")
    state["body.1.weight"] = torch.ones(2, 2)
    state["embedding.weight"] = torch.ones(4, 7)
    state["mask"] = torch.ones(3, 3, dtype=torch.complex64)
    state["extra"] = torch.ones(2)
    for model in (Model(), empty(Model)):
        text = problem(model, state)
        assert "'lm_head.weight' [7, 4]; the checkpoint has 'output.weight' of the same shape" in text
        assert "'body.0.bias' [4]; the checkpoint has 'body.0.biases' of the same shape" in text
        assert "'body.1.weight' is [4] in the module, [2, 2] in the checkpoint" in text
        assert "'embedding.weight' is [7, 4] in the module, [4, 7] in the checkpoint" in text
        assert "'mask': complex64 cannot become float32" in text
        assert "'extra' [2]" in text


def test_without_strict_live_values_stay_and_meta_modules_are_initialised(tmp_path: Path) -> None:
    state = Model().state_dict()
    lacking = {"lm_head.weight", "body.0.bias", "body.1.running_var"}
    for name in lacking:
        del state[name]
    torch.save({**state, "spare": torch.ones(1)}, tmp_path / "f.pth")
    live = Model()
    kept = live.lm_head.weight.clone()
    report = sluice.load_into(live, tmp_path / "f.pth", strict=False)
    assert torch.equal(live.lm_head.weight, kept)
    assert set(report.missing) == lacking
    assert (report.unexpected, report.initialised) == (("spare",), ())
    model = empty(Model)
    report = sluice.load_into(model, tmp_path / "f.pth", strict=False)
    assert set(report.initialised) == set(report.missing) == lacking
    assert torch.equal(model.get_parameter("body.0.weight"), state["body.0.weight"])
    assert torch.equal(model.get_buffer("body.1.running_var"), torch.ones(4))
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert report.final_bytes == sum(tensor.nbytes for tensor in model.state_dict().values())
    assert report.tensors == len(model.state_dict())


@pytest.mark.parametrize("name", ["in_proj_weight", "bias_k", "out_proj.weight", "out_proj.bias"])
def test_attention_initialises_itself(name: str, tmp_path: Path) -> None:
    def build() -> nn.Module:
        return nn.MultiheadAttention(8, 2, add_bias_kv=True)

    state = {key: tensor for key, tensor in build().state_dict().items() if key != name}
    torch.save(state, tmp_path / "f.pth")
    model = empty(build)
    report = sluice.load_into(model, tmp_path / "f.pth", strict=False)
    assert report.initialised == (name,)
    assert bool(model.get_parameter(name).isfinite().all())
    assert all(torch.equal(tensor, state[key]) for key, tensor in model.state_dict().items() if key != name)


def test_tensors_to_initialise_count_towards_the_limit(tmp_path: Path) -> None:
    torch.save({"1.weight": torch.ones(8, 8)}, tmp_path / "f.pth")
    model = empty(lambda: nn.Sequential(nn.Embedding(16384, 1024), nn.Linear(8, 8, bias=False)))
    memory = sluice.MemoryLimits(host=16384 * 1024 * 4, staging="4MiB")
    with pytest.raises(sluice.BudgetError):
        sluice.load_into(model, tmp_path / "f.pth", strict=False, memory=memory)


def test_post_hooks_may_change_the_lists_as_in_load_state_dict(tmp_path: Path) -> None:
    torch.save({"weight": torch.ones(2, 2), "spare": torch.ones(1)}, tmp_path / "f.pth")
    model = nn.Linear(2, 2)
    model.register_load_state_dict_post_hook(lambda _, keys: keys.unexpected_keys.clear())  # type: ignore[no-untyped-call]
    report = sluice.load_into(model, tmp_path / "f.pth", strict=False)
    assert (report.missing, report.unexpected) == (("bias",), ())
    torch.save(nn.Linear(2, 2).state_dict(), tmp_path / "f.pth")
    model.register_load_state_dict_post_hook(lambda _, keys: keys.missing_keys.append("imaginary"))  # type: ignore[no-untyped-call]
    with pytest.raises(sluice.PartialLoadError, match=r"a load_state_dict post-hook reports .*imaginary"):
        sluice.load_into(model, tmp_path / "f.pth")


def test_a_failing_post_hook_leaves_a_complete_module_and_is_reported(tmp_path: Path) -> None:
    def fail(*_: object) -> None:
        raise ValueError("late")

    source = nn.Linear(2, 2)
    torch.save(source.state_dict(), tmp_path / "f.pth")
    model = empty(lambda: nn.Linear(2, 2))
    model.register_load_state_dict_post_hook(fail)
    with pytest.raises(sluice.PartialLoadError, match="every tensor was loaded, but a load_state_dict post-hook"):
        sluice.load_into(model, tmp_path / "f.pth")
    assert torch.equal(model.weight, source.weight)
