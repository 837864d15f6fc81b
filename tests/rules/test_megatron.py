"""Models are written to directories of Megatron's ranks and joined from them, bit for bit."""

from __future__ import annotations

import re
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch

import sluice
from sluice import IncompleteCheckpointError, MismatchError, UnsupportedError, rules
from support.directories import assert_same
from support.megatron_ranks import HEADS, VOCABULARY, Ranks, State, core_of_llama, gpt, llama, older_of_gpt, write

LAYOUTS = [Ranks(1, 1), Ranks(2, 1), Ranks(2, 2), Ranks(1, 4), Ranks(2, 2, chunks=2)]


def joined(source: Path, tmp_path: Path, layout: Any, heads: int = HEADS) -> State:
    rule = rules.megatron(layout, heads=heads, vocabulary=VOCABULARY)
    sluice.convert(source, tmp_path / "joined.safetensors", rules=[rule], overwrite=True)
    return dict(sluice.load_state_dict(tmp_path / "joined.safetensors"))


@pytest.mark.parametrize("ranks", LAYOUTS, ids=str)
def test_a_llama(tmp_path: Path, ranks: Ranks) -> None:
    state = llama()
    core = core_of_llama(state)
    source = write(tmp_path / "iter_0000007", core, ranks)
    assert_same(joined(source, tmp_path, "llama"), state)
    sluice.convert(source, tmp_path / "core.safetensors", rules=[rules.megatron("core")])
    assert_same(sluice.load_state_dict(tmp_path / "core.safetensors"), core)


@pytest.mark.parametrize("ranks", LAYOUTS, ids=str)
def test_a_gpt_of_older_names(tmp_path: Path, ranks: Ranks) -> None:
    state = gpt()
    assert_same(joined(write(tmp_path / "in", older_of_gpt(state), ranks), tmp_path, "gpt"), state)


def test_the_other_verbs(tmp_path: Path) -> None:
    state = llama()
    source = write(tmp_path / "in", core_of_llama(state), Ranks(2, 2))
    rule = rules.megatron("llama", heads=HEADS, vocabulary=VOCABULARY)
    model = torch.nn.Module()
    for name, tensor in state.items():
        *path, last = name.split(".")
        inner = model
        for part in path:
            if not hasattr(inner, part):
                inner.add_module(part, torch.nn.Module())
            inner = inner.get_submodule(part)
        inner.register_parameter(last, torch.nn.Parameter(torch.empty_like(tensor, device="meta")))
    assert sluice.plan(model, source, rules=[rule]).read_bytes
    report = sluice.load_into(model, source, rules=[rule])
    assert report.loaded == len(state)
    assert_same(model.state_dict(), state)
    with sluice.open(source) as checkpoint:
        assert checkpoint.format == "torch-ranks"
        assert len(checkpoint.files) == 4
        assert checkpoint["mp_rank_01_001.decoder.layers.0.mlp.linear_fc2.weight"].shape == (8, 6)
    with sluice.open(source, key="mp_rank_00_000") as checkpoint:
        assert "embedding.word_embeddings.weight" in checkpoint
    assert sluice.verify(source).ok
    for one in (source / "mp_rank_00_000", source / "mp_rank_00_000" / "model_optim_rng.pt"):
        with sluice.open(one) as checkpoint:
            assert checkpoint.tree["iteration"] == 7


@pytest.mark.parametrize("packed", [False, True], ids=["directory", ".nemo"])
def test_nemo(tmp_path: Path, packed: bool) -> None:
    state = llama()
    source = write(tmp_path / "in", core_of_llama(state), Ranks(2, 2), nemo=True)
    (source / "model_config.yaml").write_text("tensor_model_parallel_size: 2\n", encoding="utf-8")
    if packed:
        with tarfile.open(tmp_path / "m.nemo", "w") as archive:
            archive.add(source, ".")
        source = tmp_path / "m.nemo"
    assert_same(joined(source, tmp_path, "llama"), state)


def test_missing_ranks_other_forms_and_old_versions_are_refused(tmp_path: Path) -> None:
    source = write(tmp_path / "in", core_of_llama(llama()), Ranks(2, 2))
    (source / "mp_rank_01_000" / "model_optim_rng.pt").unlink()
    with pytest.raises(IncompleteCheckpointError, match=r"mp_rank_01_000/model_optim_rng\.pt"):
        sluice.open(source)
    (source / "mp_rank_99_999").mkdir()
    with pytest.raises(sluice.LimitError, match=r"the number of ranks exceeds the limit 'files'.* 100000"):
        sluice.open(source, limits=sluice.Limits(files=1000))
    (source / "mp_rank_00").mkdir()
    with pytest.raises(sluice.FormatError, match="the directories of ranks have different forms"):
        sluice.open(source)
    (tmp_path / "mp_rank_00").mkdir()
    torch.save({"model": {"w": torch.ones(2)}, "checkpoint_version": 1.0}, tmp_path / "mp_rank_00/model_optim_rng.pt")
    with pytest.raises(UnsupportedError, match="from 2020 or earlier"):
        sluice.open(tmp_path)


AT = "decoder.layers.1."


@pytest.mark.parametrize(
    ("name", "tensor", "to", "problem"),
    [
        (f"{AT}mlp.linear_fc2.weight", None, "", r"tensor ranks \[1\] do not have it"),
        (f"{AT}mlp.linear_fc2.weight", torch.ones(9, 6), "", "differ in more than dimension 1"),
        (f"{AT}mlp.linear_fc1.layer_norm_weight", torch.ones(9), "", "different shapes or dtypes of a tensor"),
        (f"{AT}mlp.linear_fc1.weight", torch.ones(10, 8), f"{AT}mlp.linear_fc1.weight", "neither the columns"),
        ("output_layer.weight", torch.tensor(1.0), "output_layer.weight", "it has no rows"),
        (f"{AT}mlp.router.weight", torch.ones(2), f"{AT}mlp.router.weight", "how it is divided .* is not known"),
        (
            f"{AT}x",
            torch.ones(2),
            f"{AT}mlp.experts.local_experts.0.linear_fc1.weight",
            "does not join expert-parallel ranks",
        ),
        (f"{AT}x", torch.ones(2), "decoder.layers.9.input_layernorm.weight", "layers are missing"),
    ],
)
def test_ranks_that_contradict_each_other(
    tmp_path: Path, name: str, tensor: torch.Tensor | None, to: str, problem: str
) -> None:
    source = write(tmp_path / "in", core_of_llama(llama()), Ranks(2, 1))
    for file in source.glob("*/*.pt" if to else "mp_rank_01*/*.pt"):  # all ranks, or the second one
        content = torch.load(file, weights_only=False)
        content["model"].pop(name, None)
        if tensor is not None:
            content["model"][to or name] = tensor
        torch.save(content, file)
    with pytest.raises(MismatchError, match=problem):
        joined(source, tmp_path, "llama")


def test_layouts_that_do_not_fit(tmp_path: Path) -> None:
    source = write(tmp_path / "in", core_of_llama(llama()), Ranks(1, 1))
    with pytest.raises(MismatchError, match="'gpt' has no gate in its MLP"):
        joined(source, tmp_path, "gpt")
    with pytest.raises(MismatchError, match="do not fit 3 heads"):
        joined(source, tmp_path, "llama", heads=3)
    with pytest.raises(ValueError, match="needs heads="):
        rules.megatron("llama")
    with pytest.raises(ValueError, match=re.escape("write 'core', 'gpt' or 'llama'")):
        rules.megatron("bert", heads=2)  # type: ignore[arg-type]
    older = write(tmp_path / "gpt", older_of_gpt(gpt()), Ranks(1, 1))
    with pytest.raises(MismatchError, match="'llama' has a gate in its MLP"):
        joined(older, tmp_path, "llama")
    torch.save({"w": torch.ones(1)}, tmp_path / "other.pt")
    with pytest.raises(MismatchError, match="matches no tensor"):
        sluice.convert(tmp_path / "other.pt", tmp_path / "o.pt", rules=[rules.megatron("core")])
