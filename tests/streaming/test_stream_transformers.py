"""Models of transformers, streamed: the outputs of the loaded model, bit for bit, and equal generated tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import sluice
from sluice import rules
from sluice._errors import BudgetError
from support.hf_architectures import CASES, Case
from support.hf_comparing import outputs

_PARAMETERS = [pytest.param(case, id=case.name, marks=() if case.quick else pytest.mark.long) for case in CASES]


@pytest.fixture
def small_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stream the weights of models whose largest has a few kilobytes."""
    monkeypatch.setattr("sluice._defaults.STREAMED_BYTES", 1)
    monkeypatch.setattr("sluice._defaults.RECYCLED_STEP_BYTES", 4096)


def _empty(transformers: Any, case: Case) -> Any:
    with sluice.empty_init():
        return getattr(transformers, case.name)(case.config(transformers)).eval()


@pytest.mark.usefixtures("small_weights")
@pytest.mark.parametrize("case", _PARAMETERS)
def test_outputs_are_those_of_the_loaded_model(transformers: Any, tmp_path: Path, case: Case) -> None:
    model, inputs = case.model(transformers), case.inputs()
    torch.save(model.state_dict(), tmp_path / "model.pth")
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    with torch.inference_mode():
        torch.manual_seed(0)
        want = outputs(model, inputs)
        for share in (0.6, 0.4):
            running = _empty(transformers, case)
            try:
                stream = sluice.stream(running, tmp_path / "model.pth", memory=int(nbytes * share))
            except BudgetError:
                continue  # a layer of this tiny model is larger
            with stream:
                for _ in range(2):
                    torch.manual_seed(0)
                    found = outputs(running, inputs)
                    assert isinstance(found, list), found
                    assert isinstance(want, list), want
                    assert all(torch.equal(one, other) for one, other in zip(found, want, strict=True))
                assert stream.report.read_bytes


@pytest.mark.usefixtures("small_weights")
def test_generated_tokens_are_those_of_the_loaded_model(transformers: Any, tmp_path: Path) -> None:
    case = next(case for case in CASES if case.name == "LlamaForCausalLM")
    model = case.model(transformers)
    model.save_pretrained(tmp_path / "model", max_shard_size="30KB")
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    ids = torch.arange(3, 9)[None]
    want = model.generate(ids, max_new_tokens=8, do_sample=False)
    running = _empty(transformers, case)
    with sluice.stream(running, tmp_path / "model", memory=int(nbytes * 0.6)):
        assert running.device == torch.device("cpu")
        assert torch.equal(running.generate(ids, max_new_tokens=8, do_sample=False), want)


#: Rules for checkpoints of Mixtral on the Hub, whose experts are separate; those of the model are one tensor.
_EXPERTS = [
    rules.rename("**.block_sparse_moe.gate.weight", "**.mlp.gate.weight"),
    rules.concatenate(
        [f"**.block_sparse_moe.experts.*.{part}.weight" for part in ("w1", "w3")],
        into="**.block_sparse_moe.experts.*.w13",
    ),
    rules.stack("**.block_sparse_moe.experts.#.w13", into="**.mlp.experts.gate_up_proj"),
    rules.stack("**.block_sparse_moe.experts.#.w2.weight", into="**.mlp.experts.down_proj"),
]


@pytest.mark.usefixtures("small_weights")
def test_experts_are_joined_by_rules_while_they_are_read(transformers: Any, tmp_path: Path) -> None:
    case = next(case for case in CASES if case.name == "MixtralForCausalLM")
    model = case.model(transformers).eval()
    model.save_pretrained(tmp_path / "model")
    ids = torch.arange(3, 9)[None]
    want = model.generate(ids, max_new_tokens=8, do_sample=False)
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    running = _empty(transformers, case)
    with sluice.stream(running, tmp_path / "model", memory=int(nbytes * 0.7), rules=_EXPERTS) as stream:
        assert torch.equal(running.generate(ids, max_new_tokens=8, do_sample=False), want)
        assert stream.report.call_bytes
