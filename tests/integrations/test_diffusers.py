"""Pipelines of diffusers have the weights that the library's own loader gives."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import sluice
from support.hf_comparing import assert_same_weights

diffusers = pytest.importorskip("diffusers")
transformers = pytest.importorskip("transformers")

from sluice.integrations.diffusers import _model, load_pipeline  # noqa: E402  it imports diffusers

pytest.importorskip("tqdm").tqdm.monitor_interval = 0  # no thread

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def unconditional(tmp_path: Path) -> Path:
    unet = diffusers.UNet2DModel(
        sample_size=8,
        block_out_channels=(8, 16),
        norm_num_groups=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )
    diffusers.DDPMPipeline(unet, diffusers.DDPMScheduler(num_train_timesteps=7)).save_pretrained(tmp_path)
    return tmp_path


def text_to_image() -> Any:
    unet = diffusers.UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(8, 16),
        norm_num_groups=4,
        cross_attention_dim=16,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    )
    vae = diffusers.AutoencoderKL(block_out_channels=(8,), norm_num_groups=4)
    config = transformers.CLIPTextConfig(
        vocab_size=40, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    return diffusers.StableDiffusionPipeline(
        unet=unet,
        vae=vae,
        text_encoder=transformers.CLIPTextModel(config),
        tokenizer=transformers.CLIPTokenizer(vocab={"<|startoftext|>": 0, "<|endoftext|>": 1, "a</w>": 2}, merges=[]),
        scheduler=diffusers.DDIMScheduler(),
        safety_checker=None,
        feature_extractor=transformers.CLIPImageProcessor(),
        requires_safety_checker=False,
    )


def assert_same(ours: Any, theirs: Any) -> None:
    assert type(ours) is type(theirs)
    assert dict(ours.config) == dict(theirs.config)
    for name, expected in theirs.components.items():
        found = ours.components[name]
        assert type(found) is type(expected)
        if isinstance(expected, torch.nn.Module):
            assert not found.training
            tensors = {**dict(found.named_parameters()), **dict(found.named_buffers())}
            for key, value in [*expected.named_parameters(), *expected.named_buffers()]:
                assert (tensors[key].dtype, tensors[key].device) == (value.dtype, value.device), key
                assert torch.equal(tensors[key], value), key
        elif hasattr(expected, "get_vocab"):
            assert found.get_vocab() == expected.get_vocab()
        elif hasattr(expected, "config"):
            assert dict(found.config) == dict(expected.config)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_an_unconditional_pipeline(unconditional: Path, dtype: torch.dtype | None) -> None:
    for file in [*unconditional.glob("*/*")]:  # one folder, as for older versions
        os.renames(file, unconditional / file.name)
    ours = load_pipeline(unconditional, dtype=dtype)
    assert_same(ours, diffusers.DiffusionPipeline.from_pretrained(str(unconditional), torch_dtype=dtype))
    if dtype is None:
        ours.set_progress_bar_config(disable=True)
        assert len(ours(num_inference_steps=1).images) == 1


@pytest.mark.parametrize("dtype", [None, torch.float16])
@pytest.mark.parametrize("stored", [torch.float32, torch.float16])
def test_a_pipeline_with_a_model_of_transformers(
    tmp_path: Path, dtype: torch.dtype | None, stored: torch.dtype
) -> None:
    text_to_image().to(stored).save_pretrained(tmp_path, safe_serialization=stored != torch.float16)
    text = re.sub(r"CLIPImageProcessor\w*", "CLIPFeatureExtractor", (tmp_path / "model_index.json").read_text())
    (tmp_path / "model_index.json").write_text(text.replace('"safety_checker"', '"another_checker"'))  # of old versions
    theirs = diffusers.DiffusionPipeline.from_pretrained(str(tmp_path), torch_dtype=dtype)
    assert_same(load_pipeline(tmp_path, dtype=dtype), theirs)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_buffers_of_the_file_are_cast_too(tmp_path: Path, monkeypatch: Any, dtype: torch.dtype | None) -> None:
    positions = {"sample_size": 8, "pos_embed_max_size": 8, "num_layers": 1, "caption_projection_dim": 16}
    heads = {"num_attention_heads": 2, "attention_head_dim": 8, "joint_attention_dim": 16, "pooled_projection_dim": 16}
    transformer = diffusers.SD3Transformer2DModel(**positions, **heads, in_channels=4)
    transformer.save_pretrained(tmp_path)
    monkeypatch.setattr(diffusers.SD3Transformer2DModel, "_keys_to_ignore_on_load_unexpected", ["old_norm"])
    weights = tmp_path / "diffusion_pytorch_model.safetensors"
    sluice.save(sluice.load_state_dict(weights) | {"old_norm.weight": torch.ones(1)}, weights, overwrite=True)
    theirs = diffusers.SD3Transformer2DModel.from_pretrained(str(tmp_path), torch_dtype=dtype)
    assert_same_weights(_model(tmp_path, diffusers.SD3Transformer2DModel, dtype, None), theirs)


def test_given_components_are_used(unconditional: Path) -> None:
    scheduler = diffusers.DDPMScheduler(num_train_timesteps=5)
    assert load_pipeline(unconditional, scheduler=scheduler).scheduler is scheduler
    with pytest.raises(TypeError, match=r"load_pipeline\(\) .* variant"):
        load_pipeline(unconditional, variant="fp16")


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        (["os", "system"], "names a class"),
        ([["diffusers"], "os"], "names a class"),
        (["pipeline_utils", "os"], "names a class"),
        (["diffusers", "logging"], "names a class"),
        (["diffusers", "AttnProcsLayers"], "names a class|neither"),
    ],
)
def test_no_other_code_is_imported(unconditional: Path, entry: list[str], problem: str) -> None:
    index = unconditional / "model_index.json"
    index.write_text(json.dumps({**json.loads(index.read_text()), "unet": entry}))
    with pytest.raises(sluice.UnsupportedError, match=problem):
        load_pipeline(unconditional)
    index.write_text("[1")
    with pytest.raises(sluice.FormatError):
        load_pipeline(unconditional)
