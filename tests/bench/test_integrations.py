"""``python -m bench.integrations``: the functions in a pair load the same weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bench.integrations import METHODS, _write, work


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_every_function_loads_the_weights(tmp_path: Path) -> None:
    for folder in (tmp_path / "small", tmp_path):
        _write({"w": torch.full((3,), 2.0)}, folder)
    for name, (file, _) in METHODS.items():
        if "CheckpointIO" in name:
            pytest.importorskip("lightning")
        steps = work(name, str(tmp_path / file), json.dumps({"w": [3]}))
        next(steps), next(steps), next(steps)
        with pytest.raises(StopIteration) as done:
            next(steps)
        assert done.value.value == {"sum": 2.0}
