"""docs/rules.md runs when pasted: GPT-2 from transformers to the tutorial's model and back, and training files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import sluice
from sluice.benchmark.gpt2 import GPTConfig, GPTModel
from support.documents import ROOT, run_document
from support.trained_net import empty

CONFIG = GPTConfig(vocab_size=211, context_length=24, emb_dim=48, n_heads=4, n_layers=3, qkv_bias=True)
TOKENS = torch.arange(2 * 20).view(2, 20) * 5


@pytest.fixture(scope="module")
def docs(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    """Return the names that the examples of the page define."""
    return run_document(ROOT / "docs" / "rules.md", tmp_path_factory.mktemp("docs")).namespace


@pytest.fixture(scope="module")
def make_gpt2() -> Callable[[], torch.nn.Module]:
    """Return a function that builds transformers' GPT-2 with random weights."""
    transformers = pytest.importorskip("transformers")
    transformers.utils.logging.disable_progress_bar()  # it would leave a thread
    shape = {"vocab_size": 211, "n_positions": 24, "n_embd": 48, "n_head": 4, "n_layer": 3}
    config = transformers.GPT2Config(**shape, bos_token_id=0, eos_token_id=0)

    def make() -> torch.nn.Module:
        model: torch.nn.Module = transformers.GPT2LMHeadModel(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():  # also biases, which start at zero
                parameter.normal_(0, 0.2)
        return model

    return make


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        out = model(TOKENS)
    return out if isinstance(out, torch.Tensor) else out.logits


@pytest.mark.parametrize("kind", ["safetensors", "bin", "base", "old"])
def test_hugging_faces_gpt2_becomes_the_tutorials(
    tmp_path: Path, docs: Mapping[str, Any], make_gpt2: Callable[[], Any], kind: str
) -> None:
    theirs = make_gpt2()
    source = tmp_path / "pytorch_model.bin"
    if kind == "safetensors":
        theirs.save_pretrained(tmp_path)
        source = tmp_path
    elif kind == "bin":
        torch.save(theirs.state_dict(), source)
    else:  # files on the hub lack the head and its prefix, and include causal masks
        state = theirs.transformer.state_dict()
        if kind == "old":
            masks = {f"h.{i}.attn.bias": torch.ones(1, 1, 24, 24).tril() for i in range(3)}
            state.update(masks | {f"h.{i}.attn.masked_bias": torch.tensor(-1e4) for i in range(3)})
        torch.save(state, source)
    ours = docs["load_gpt2"](str(source), CONFIG)
    torch.testing.assert_close(logits(ours), logits(theirs), rtol=1e-5, atol=1e-5)
    expected = theirs.transformer.h[1].attn.c_attn.weight[:, 48:96].t()
    assert torch.equal(ours.trf_blocks[1].att.W_key.weight, expected)


@pytest.mark.parametrize("strict", [False, True])
def test_the_tutorials_gpt2_becomes_hugging_faces(
    tmp_path: Path, docs: Mapping[str, Any], make_gpt2: Callable[[], Any], strict: bool
) -> None:
    torch.manual_seed(0)
    ours = GPTModel(CONFIG).eval()
    ours.out_head.weight = ours.tok_emb.weight
    torch.save(ours.state_dict(), tmp_path / "model.pth")
    theirs = make_gpt2()
    report = sluice.load_into(theirs, tmp_path / "model.pth", rules=docs["to_hugging_face"], strict=strict)
    torch.testing.assert_close(logits(theirs), logits(ours), rtol=1e-5, atol=1e-5)
    assert (report.missing, report.unexpected) == ((), ())
    assert report.origins["transformer.h.0.attn.c_attn.weight"] == (
        "concatenation of (trf_blocks.0.att.W_query.weight; trf_blocks.0.att.W_key.weight; "
        "trf_blocks.0.att.W_value.weight) in dimension 0 transposed"
    )


def test_a_head_that_differs_from_the_embedding_is_not_tied_silently(
    tmp_path: Path, docs: Mapping[str, Any], make_gpt2: Callable[[], Any]
) -> None:
    torch.save(GPTModel(CONFIG).state_dict(), tmp_path / "model.pth")
    with pytest.raises(sluice.MismatchError, match="tied in the model and differ in the checkpoint"):
        sluice.load_into(make_gpt2(), tmp_path / "model.pth", rules=docs["to_hugging_face"])


@pytest.fixture
def trained(tmp_path: Path) -> tuple[Path, GPTModel]:
    """A checkpoint of a training script: a compiled model in DistributedDataParallel."""
    torch.manual_seed(0)
    model = GPTModel(CONFIG).eval()
    optimizer = torch.optim.AdamW(model.parameters())
    model(TOKENS).square().mean().backward()
    optimizer.step()
    wrapped = {f"_orig_mod.module.{name}": tensor for name, tensor in model.state_dict().items()}
    torch.save({"model": wrapped, "optimizer": optimizer.state_dict(), "step": 1}, tmp_path / "checkpoint.pt")
    return tmp_path / "checkpoint.pt", model


def test_a_training_checkpoint_fits_the_bare_model(trained: tuple[Path, GPTModel], docs: Mapping[str, Any]) -> None:
    path, expected = trained
    model = empty(lambda: GPTModel(CONFIG))
    report = docs["load_trained"](path, model)
    assert report.key == "model"
    assert torch.equal(logits(model.eval()), logits(expected))


def test_a_training_checkpoint_becomes_a_model_for_inference(
    trained: tuple[Path, GPTModel], docs: Mapping[str, Any]
) -> None:
    path, expected = trained
    model = empty(lambda: GPTModel({**CONFIG, "vocab_size": 256}))
    docs["load_for_inference"](path, model, 256)
    assert {name.rpartition(".")[2] for name, p in model.named_parameters() if p.dtype == torch.float32} == {
        "scale",
        "shift",
    }
    assert torch.equal(model.tok_emb.weight[:211], expected.tok_emb.weight.bfloat16())
    assert model.out_head.weight[211:].count_nonzero() == 0
    assert torch.equal(model.final_norm.scale, expected.final_norm.scale)
