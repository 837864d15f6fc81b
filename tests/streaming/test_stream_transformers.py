"""Models of transformers, streamed: the outputs of the loaded model, bit for bit, and equal generated tokens."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import sluice
from sluice import rules
from sluice._errors import BudgetError, MismatchError
from support.hf_architectures import CASES, Case, case_named
from support.hf_comparing import outputs
from support.streamed_models import adapt, empty, same, train

_PARAMETERS = [pytest.param(case, id=case.name, marks=() if case.quick else pytest.mark.long) for case in CASES]

pytestmark = pytest.mark.usefixtures("small_weights")


@pytest.fixture
def small_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stream the weights of models whose largest has a few kilobytes."""
    monkeypatch.setattr("sluice._defaults.STREAMED_BYTES", 1)
    monkeypatch.setattr("sluice._defaults.RECYCLED_STEP_BYTES", 4096)


def _empty(transformers: Any, case: Case) -> Any:
    return empty(lambda: getattr(transformers, case.name)(case.config(transformers)))


def _made(transformers: Any, name: str) -> tuple[Case, Any, int]:
    """Return an architecture by its name, a model of it, and the bytes of its parameters."""
    case = case_named(name)
    model = case.model(transformers).eval()
    return case, model, sum(parameter.nbytes for parameter in model.parameters())


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


@pytest.mark.parametrize(
    "options",
    [{}, {"prefill_chunk_size": 4}, {"prompt_lookup_num_tokens": 3}, {"assistant_model": None}],
    ids=["plain", "chunks", "lookup", "assistant"],
)
def test_generated_tokens_are_those_of_the_loaded_model(
    transformers: Any, tmp_path: Path, options: dict[str, Any]
) -> None:
    """Each step reads the blocks once, for one sequence or for eight."""
    case, model, nbytes = _made(transformers, "LlamaForCausalLM")
    model.save_pretrained(tmp_path / "model", max_shard_size="30KB")
    chosen = {name: case.model(transformers) if value is None else value for name, value in options.items()}
    alone = "prompt_lookup_num_tokens" in options or "assistant_model" in options  # transformers takes one sequence
    running, read = _empty(transformers, case), list[int]()
    with sluice.stream(running, tmp_path / "model", memory=int(nbytes * 0.6)) as stream:
        assert running.device == torch.device("cpu")
        for batch in (1, 1 if alone else 8, 1):
            ids = (torch.arange(12) % 7 + 3).expand(batch, 12)
            want = model.generate(ids, max_new_tokens=8, do_sample=False, **chosen)
            before = stream.report
            assert torch.equal(running.generate(ids, max_new_tokens=8, do_sample=False, **chosen), want)
            read.append(stream.report.read_bytes - before.read_bytes)
            steps = stream.report.calls - before.calls
        rows = 96 * 32 * 4  # at most those of the whole embedding
        assert 0 < steps * stream.report.call_bytes <= read[1] <= steps * (stream.report.call_bytes + rows)
        assert read[1] == read[2]


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


def test_experts_are_joined_by_rules_while_they_are_read(transformers: Any, tmp_path: Path) -> None:
    case, model, nbytes = _made(transformers, "MixtralForCausalLM")
    model.save_pretrained(tmp_path / "model")
    ids = torch.arange(3, 9)[None]
    want = model.generate(ids, max_new_tokens=8, do_sample=False)
    running = _empty(transformers, case)
    with sluice.stream(running, tmp_path / "model", memory=int(nbytes * 0.7), rules=_EXPERTS) as stream:
        assert torch.equal(running.generate(ids, max_new_tokens=8, do_sample=False), want)
        assert stream.report.call_bytes


#: Layers with adapters, by architecture.
_TRAINED = {
    "GPT2LMHeadModel": ["c_attn", "c_fc"],
    "LlamaForCausalLM": ["q_proj", "up_proj"],
    "T5ForConditionalGeneration": ["q", "wi"],
    "MixtralForCausalLM": ["q_proj"],
    "Qwen3MoeForCausalLM": ["q_proj"],
}


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of names that peft uses too
@pytest.mark.parametrize("again", [None, False, True], ids=["saved", "checkpoint", "reentrant"])
@pytest.mark.parametrize("name", _TRAINED)
def test_training_is_that_of_the_model_in_memory(
    transformers: Any, tmp_path: Path, name: str, *, again: bool | None
) -> None:
    """With dropout, autocast and accumulated gradients, and activations that are computed again."""
    case, model, nbytes = _made(transformers, name)
    inputs = case.inputs()
    torch.save(model.state_dict(), tmp_path / "model.pth")
    inputs["labels"] = inputs.get("decoder_input_ids", inputs["input_ids"])

    def loss(model: Any) -> torch.Tensor:
        result: torch.Tensor = model(**inputs).loss
        return result

    courses = []
    for memory in (None, int(nbytes * 0.7)):
        chosen = model if memory is None else _empty(transformers, case).requires_grad_(False)
        opened = partial(sluice.stream, chosen, tmp_path / "model.pth", memory=memory, train=True)
        with opened() if memory else nullcontext():
            adapt(chosen, _TRAINED[name])
            if again is not None:
                chosen.gradient_checkpointing_enable({"use_reentrant": again})
                chosen.enable_input_require_grads()
            courses.append(train(chosen, loss, steps=4, accumulate=2, autocast=True))
            courses.append(train(chosen, loss))
    assert same(courses[0], courses[2])
    assert same(courses[1], courses[3])


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_adapters_of_peft_are_trained_and_saved(transformers: Any, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed: pip install peft")
    case, model, nbytes = _made(transformers, "LlamaForCausalLM")
    model.save_pretrained(tmp_path / "base")
    options = peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"], lora_dropout=0.1)
    rows = [{"input_ids": ids, "labels": ids} for ids in torch.arange(64).reshape(8, 8) % 90]

    def course(chosen: Any) -> dict[str, torch.Tensor]:
        arguments = transformers.TrainingArguments(
            str(tmp_path / "out"), max_steps=3, use_cpu=True, report_to=[], save_steps=2, learning_rate=1e-2, seed=3
        )
        transformers.Trainer(model=chosen, args=arguments, train_dataset=rows).train()
        return {name: each.detach().clone() for name, each in chosen.named_parameters() if each.requires_grad}

    torch.manual_seed(1)
    model = peft.get_peft_model(model, options)
    first = {name: each.detach().clone() for name, each in model.named_parameters() if each.requires_grad}
    want = course(model)
    memory = int(nbytes * 0.6)
    for way in ("before", "after", "hf"):
        running = _empty(transformers, case).requires_grad_(False)
        if way == "before":
            running = peft.get_peft_model(running, options)
            with pytest.raises(MismatchError, match="have no values"):
                sluice.stream(running, tmp_path / "base", memory=memory, strict=False, train=True)
            for name, value in first.items():
                running.get_submodule(name.rpartition(".")[0]).weight = torch.nn.Parameter(value.clone())
        if way == "hf":
            opened = sluice.hf.stream(tmp_path / "base", memory=memory, train=True)
        else:
            opened = sluice.stream(running, tmp_path / "base", memory=memory, train=True)
        with opened as stream:
            torch.manual_seed(1)
            running = running if way == "before" else peft.get_peft_model(stream.model, options)
            found = course(running)
            assert stream.report.call_bytes
            running.save_pretrained(tmp_path / "adapter")
        assert found.keys() == want.keys()
        assert all(torch.equal(found[name], value) for name, value in want.items())
        again = peft.PeftModel.from_pretrained(case.model(transformers), tmp_path / "adapter")
        assert all(torch.equal(again.get_parameter(name), value) for name, value in want.items())
