"""A lazy state dict fills models of transformers through the library's own loader."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sluice.integrations.transformers import lazy_state_dict
from support.hf_architectures import case_named

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize("nested", [False, True])
def test_a_state_dict_is_read_by_the_library(tmp_path: Path, *, nested: bool) -> None:
    saved = case_named("LlamaForCausalLM").model(transformers)
    state = saved.state_dict()
    torch.save({"model": state, "step": 1} if nested else state, tmp_path / "m.pth")
    transformers.utils.logging.disable_progress_bar()  # its monitor is a thread
    lazy = lazy_state_dict(tmp_path / "m.pth")
    norm = lazy["model.norm.weight"]
    assert (norm.get_shape(), norm.get_dtype()) == ([32], "F32")
    model = transformers.LlamaForCausalLM.from_pretrained(None, config=saved.config, state_dict=lazy)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert model.dtype == torch.float32
