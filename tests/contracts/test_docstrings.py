"""The examples in the docstrings of public names run and print the shown results."""

from __future__ import annotations

import doctest
import errno
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import sluice
import sluice.rules
import sluice.testing
from sluice.benchmark.gpt2 import GPTConfig, GPTModel
from sluice.formats.safetensors.reader import SafetensorsFormat
from sluice.sources.local import LocalFile
from support.documents import session

#: Examples that are not run, and why.
_NOT_RUN = {
    "sluice.hf.from_pretrained": "needs GPT-2 XL; docs/huggingface.md runs the same call",
    "sluice.shared": "writes to shared memory; docs/planning.md runs the same call in a directory",
}
if _refusal := sluice.testing.memory_limit_refusal():
    _NOT_RUN["sluice.testing.run_limited"] = _refusal


def _found(obj: object, name: str) -> list[doctest.DocTest]:
    if not (callable(obj) or hasattr(obj, "__path__") or hasattr(obj, "__all__")) or not getattr(obj, "__doc__", ""):
        return []
    if hasattr(obj, "__all__"):
        made = doctest.DocTestParser().get_doctest(obj.__doc__ or "", {}, name, None, 0)
        return [made] if made.examples else []
    finder = doctest.DocTestFinder(exclude_empty=True)
    return [test for test in finder.find(obj, name, module=False) if test.examples]


_OBJECTS = {
    "sluice": sluice,
    "sluice.hf.from_pretrained": sluice.hf.from_pretrained,
    **{
        f"{module.__name__}.{name}": getattr(module, name)
        for module in (sluice, sluice.rules, sluice.testing)
        for name in module.__all__
    },
}
_EXAMPLES = {test.name: test for name, obj in _OBJECTS.items() for test in _found(obj, name)}


@pytest.fixture
def names(tmp_path: Path) -> dict[str, Any]:
    """Names that the examples assume: a model, its configuration and its checkpoints."""
    config = GPTConfig(vocab_size=64, context_length=8, emb_dim=16, n_heads=2, n_layers=2, qkv_bias=True)
    model = GPTModel(config)
    torch.save(model.state_dict(), tmp_path / "model.pth")
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.tensor([[1, 2, 3]])).sum().backward()
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
    torch.save(states, tmp_path / "run.pt")
    save_file({"wte.weight": torch.ones(64, 16)}, tmp_path / "model.safetensors")
    (tmp_path / "f.bin").write_bytes(bytes(range(256)) * 512)
    return {
        **{name: getattr(sluice.rules, name) for name in sluice.rules.__all__},
        **{name: getattr(sluice.testing, name) for name in sluice.testing.__all__},
        **{name: getattr(sluice, name) for name in sluice.__all__ if name[0].isupper()},
        "sluice": sluice, "torch": torch, "Path": Path, "closing": closing, "errno": errno,
        "GPTModel": GPTModel, "config": config, "model": model, "optimizer": optimizer, "scheduler": scheduler,
        "LocalFile": LocalFile, "SafetensorsFormat": SafetensorsFormat,
    }  # fmt: skip


@pytest.mark.parametrize("name", _EXAMPLES)
def test_the_example_has_the_documented_result(name: str, names: dict[str, Any], tmp_path: Path) -> None:
    if name in _NOT_RUN:
        for example in _EXAMPLES[name].examples:
            compile(example.source, name, "exec")
        return
    test = _EXAMPLES[name]
    test.globs = names
    said: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    with session(tmp_path):
        runner.run(test, out=said.append, clear_globs=False)
    assert not said, "".join(said)
    assert runner.summarize(verbose=False).attempted == len(test.examples)


def test_the_verbs_have_examples() -> None:
    assert _EXAMPLES.keys() >= _NOT_RUN.keys()
    verbs = [name for name in sluice.__all__ if name.islower() and name not in {"hf", "rules"}]
    assert {f"sluice.{name}" for name in verbs} <= _EXAMPLES.keys()
