"""Each private name of torch has a public replacement with the same result, and a warning if it is missing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sluice import _private_torch
from sluice._private_torch import KNOWN_LOADERS, NORM_BASE, PRIVATE_NAMES

REPLACEMENTS: dict[str, Any] = {name: replacement for _, name, replacement in PRIVATE_NAMES}


def test_this_torch_has_every_name() -> None:
    assert _private_torch.MISSING_NAMES == ()


def test_replacements_of_values() -> None:
    class WithState(nn.Module):
        def get_extra_state(self) -> int:
            return 1

    assert list(WithState().state_dict()) == [REPLACEMENTS["_EXTRA_STATE_KEY_SUFFIX"]]
    theirs: Any = nn.Module().load_state_dict({})
    ours = REPLACEMENTS["_IncompatibleKeys"]([], [])
    assert (ours, ours._fields) == (theirs, theirs._fields)
    assert KNOWN_LOADERS[1] is NORM_BASE._load_from_state_dict
    assert all(issubclass(kind, NORM_BASE) for kind in (nn.BatchNorm3d, nn.SyncBatchNorm, nn.InstanceNorm2d))


def test_replacements_of_functions_on_tensors() -> None:
    real, numbers = torch.randn(3), torch.randn(3, dtype=torch.complex64)
    assert torch.equal(REPLACEMENTS["_neg_view"](real), torch._neg_view(real))
    targets = [torch.zeros(2), torch.zeros(3, dtype=torch.bfloat16)]
    REPLACEMENTS["_foreach_copy_"](targets, [torch.ones(2), real])
    assert torch.equal(targets[0], torch.ones(2))
    assert torch.equal(targets[1], real.bfloat16())
    for bits in (["conj"], ["neg"], ["conj", "neg"]):
        theirs = numbers.clone()
        assert _private_torch.set_math_bits(theirs, bits) is theirs
        ours = REPLACEMENTS["set_tensor_metadata"](numbers.clone(), dict.fromkeys(bits, True))
        assert torch.equal(ours.resolve_neg(), theirs.resolve_conj().resolve_neg())
    for requires_grad in (True, False):
        parameter = REPLACEMENTS["_make_subclass"](nn.Parameter, real, requires_grad)
        assert type(parameter) is nn.Parameter
        assert (parameter.requires_grad, parameter.data_ptr()) == (requires_grad, real.data_ptr())
    assert not REPLACEMENTS["is_traceable_wrapper_subclass"](real)
    one, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.zeros(3))
    REPLACEMENTS["_swap_tensor_impl"](one, other)
    assert (one.shape, other.shape) == ((3,), (2,))
    assert REPLACEMENTS["_use_count"](real) != 1


def test_a_torch_without_these_names(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(300, 200), nn.BatchNorm1d(200))
    state = {**model.state_dict(), "c": torch.randn(5, dtype=torch.complex64).conj()}
    torch.save(state, tmp_path / "f.pth")
    code = """
import sys, warnings
import torch
for where, name in [("torch", "_neg_view"), ("torch._utils", "set_tensor_metadata"),
                    ("torch.utils._python_dispatch", "is_traceable_wrapper_subclass")]:
    delattr(sys.modules[where], name)
from torch import nn
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import sluice
    ours = sluice.load_state_dict(sys.argv[1])
    model = nn.Sequential(nn.Linear(300, 200), nn.BatchNorm1d(200)).bfloat16()
    sluice.load_into(model, sys.argv[1], strict=False)
[warning] = [str(each.message) for each in caught if "public functions" in str(each.message)]
assert "torch._neg_view, torch._utils.set_tensor_metadata, torch.utils._python_dispatch.is_trace" in warning, warning
torch.save({"ours": {name: tensor.resolve_conj() for name, tensor in ours.items()}}, sys.argv[2])
"""
    subprocess.run([sys.executable, "-c", code, tmp_path / "f.pth", tmp_path / "out.pth"], check=True, timeout=250)
    ours = torch.load(tmp_path / "out.pth", weights_only=True)["ours"]
    assert all(torch.equal(ours[name], tensor) for name, tensor in state.items())
