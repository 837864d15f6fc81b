"""Hugging Face models that are loaded onto an accelerator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import sluice


@pytest.mark.gpu
def test_a_model_computes_as_on_the_cpu(tmp_path: Path, transformers: Any, device: str) -> None:
    settings = transformers.GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    expected = transformers.GPT2LMHeadModel(settings).eval()
    expected.save_pretrained(tmp_path / "model")
    model = sluice.hf.from_pretrained(tmp_path / "model", device=device)
    tokens = torch.randint(0, 96, (2, 9))
    with torch.no_grad():
        ours, theirs = model(tokens.to(device)).logits, expected(tokens).logits
    torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-2, atol=1e-2)
    assert model.lm_head.weight is model.transformer.wte.weight
