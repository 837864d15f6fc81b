"""Loads to a device: bits of every dtype, casts, layouts, ties, small and huge tensors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import sluice
from sluice import rules
from sluice._dtypes import dtype_name, torch_dtype
from sluice._options import PageCache
from sluice.engine.accelerators import accelerators
from sluice.reading import transfer as _transfer
from support.dtypes import TORCH_DTYPES, any_bits
from support.oracles import bits
from support.trained_net import empty

pytestmark = pytest.mark.gpu

MIB = 1 << 20

#: More elements than one read holds, and not a multiple of a block.
COUNT = 3 * MIB + 7


def meta_parameters(state_dict: dict[str, torch.Tensor]) -> nn.ParameterDict:
    """Return a module on meta with the names, shapes and dtypes of a state dict."""
    return nn.ParameterDict(
        {name: nn.Parameter(torch.empty_like(t, device="meta"), requires_grad=False) for name, t in state_dict.items()}
    )


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("name", TORCH_DTYPES)
def test_every_dtype_arrives_bit_by_bit(tmp_path: Path, device: str, name: str) -> None:
    tensor = any_bits(name, COUNT)
    torch.save({"t": tensor}, tmp_path / "f.pth")
    loaded = sluice.load_state_dict(tmp_path / "f.pth", device=device)["t"]
    assert (loaded.dtype, loaded.device) == (torch_dtype(name), torch.device(device))
    assert bits(loaded) == bits(tensor)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float16),
        (torch.float32, torch.float64),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.bfloat16),
        (torch.float64, torch.float32),
    ],
    ids=dtype_name,
)
def test_casts_equal_tensor_to(tmp_path: Path, device: str, old: torch.dtype, new: torch.dtype) -> None:
    special = torch.tensor([0.0, -0.0, 1e-40, 65519.0, 65520.0, 3.4e38, torch.inf, -torch.inf, torch.nan])
    tensors = {"t": torch.cat([torch.randn(COUNT), special]).to(old)}
    torch.save(tensors, tmp_path / "f.pth")
    model = meta_parameters(tensors)
    report = sluice.load_into(model, tmp_path / "f.pth", device=device, dtype=new)
    loaded, expected = model["t"].detach().cpu(), tensors["t"].to(new)
    number = ~expected.isnan()
    assert torch.equal(loaded.isnan(), expected.isnan())  # the payload of a NaN depends on the processor
    assert bits(loaded[number]) == bits(expected[number])
    assert report.cast == {f"{dtype_name(old)}->{dtype_name(new)}": 1}


def test_views_keep_their_strides_and_share_memory(tmp_path: Path, device: str) -> None:
    base = torch.randn(1000, 700)
    tensors = {
        "base": base,
        "transposed": base.t(),
        "rows": base[10:20],
        "columns": base[:, ::3],
        "expanded": torch.randn(5, 1).expand(5, 400),
        "channels_last": torch.randn(64, 3, 5, 5).to(memory_format=torch.channels_last),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
    }
    torch.save(tensors, tmp_path / "f.pth")
    ours = sluice.load_state_dict(tmp_path / "f.pth", device=device)
    theirs = torch.load(tmp_path / "f.pth", map_location=device, weights_only=True)
    for name, expected in theirs.items():
        assert torch.equal(ours[name], expected), name
        if name != "expanded":  # only dense strides are guaranteed
            assert ours[name].stride() == expected.stride(), name
    assert ours["transposed"].data_ptr() == ours["base"].data_ptr()
    assert ours["rows"].data_ptr() == ours["base"].data_ptr() + 10 * 700 * 4


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
def test_the_models_own_layout_is_filled(tmp_path: Path, device: str, dtype: torch.dtype | None) -> None:
    tensors = {"conv": torch.randn(256, 64, 3, 3), "matrix": torch.randn(900, 700).t()}
    torch.save(tensors, tmp_path / "f.pth")
    model = meta_parameters(
        {"conv": tensors["conv"].to(memory_format=torch.channels_last), "matrix": tensors["matrix"].contiguous()}
    )
    strides = {name: parameter.stride() for name, parameter in model.items()}
    sluice.load_into(model, tmp_path / "f.pth", device=device, dtype=dtype)
    for name, expected in tensors.items():
        assert model[name].stride() == strides[name]
        assert torch.equal(model[name].cpu(), expected.to(dtype or expected.dtype))


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("page_cache", ["keep", pytest.param("bypass", marks=pytest.mark.long)])
def test_a_tensor_larger_than_staging(
    tmp_path: Path, device: str, page_cache: PageCache, dtype: torch.dtype | None
) -> None:
    tensor = torch.randn(12 * MIB)
    torch.save({"t": tensor}, tmp_path / "f.pth")
    loaded = sluice.load_state_dict(
        tmp_path / "f.pth",
        device=device,
        dtype=dtype,
        page_cache=page_cache,
        memory=sluice.MemoryLimits(staging="8MiB"),
    )["t"]
    assert bits(loaded) == bits(tensor.to(dtype or tensor.dtype))


@pytest.mark.parametrize("dtype", [None, torch.float64], ids=str)
def test_bytes_at_odd_offsets_arrive(tmp_path: Path, device: str, dtype: torch.dtype | None) -> None:
    tensor = torch.randn(COUNT)
    header = json.dumps({"t": {"dtype": "F32", "shape": [COUNT], "data_offsets": [0, tensor.nbytes]}}).encode()
    header += b" " * (1 - len(header) % 2)  # other writers do not align data
    (tmp_path / "f.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + tensor.numpy().tobytes())
    loaded = sluice.load_state_dict(tmp_path / "f.safetensors", device=device, dtype=dtype)["t"]
    assert torch.equal(loaded.cpu(), tensor.to(dtype or tensor.dtype))


def test_a_device_that_is_not_there_is_refused_before_reading(
    tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {"t": torch.randn(10)}
    torch.save(tensors, tmp_path / "f.pth")
    model = meta_parameters(tensors)
    monkeypatch.setattr(_transfer, "run", lambda *_, **__: pytest.fail("data was read"))
    missing = f"{torch.device(device).type}:99"
    with pytest.raises(ValueError, match=missing):
        sluice.load_into(model, tmp_path / "f.pth", device=missing)
    assert model["t"].is_meta
    assert torch.ones(3, device=device).sum().item() == 3  # the failed query did not leave an error pending


def test_parts_of_a_module_go_to_several_devices_at_once(tmp_path: Path, device: str, second_device: str) -> None:
    tensors = {"left": torch.randn(2 * COUNT), "right": torch.randn(2 * COUNT)}
    torch.save(tensors, tmp_path / "f.pth")
    model = meta_parameters(tensors)
    report = sluice.load_into(model, tmp_path / "f.pth", device={"left": device, "right": second_device})
    assert report.devices == (device, second_device)
    for name, where in (("left", device), ("right", second_device)):
        assert str(model[name].device) == where
        assert torch.equal(model[name].cpu(), tensors[name])
        # A pending runtime error would be raised by the next kernel.
        assert torch.ones(3, device=where).sum().item() == 3


def test_auto_fills_the_first_device_up_to_its_limit_and_leaves_the_rest_to_the_host(
    tmp_path: Path, device: str
) -> None:
    layers = [nn.Linear(1024, 3072) for _ in range(4)]
    torch.save(nn.Sequential(*layers).state_dict(), tmp_path / "f.pth")
    model = empty(lambda: nn.Sequential(*(nn.Linear(1024, 3072) for _ in range(4))))
    limits: dict[str, int | str] = dict.fromkeys(accelerators(), 0)
    report = sluice.load_into(
        model, tmp_path / "f.pth", device="auto", memory=sluice.MemoryLimits(device=limits | {device: "40MiB"})
    )
    assert report.placement == {"0": device, "1": device, "2": "cpu", "3": "cpu"}
    [memory] = report.device_memory
    assert memory.reserved_bytes is not None
    assert memory.reserved_bytes <= 40 * MIB
    for layer, expected in zip(model, layers, strict=True):
        assert isinstance(layer, nn.Linear)
        assert torch.equal(layer.weight.cpu(), expected.weight)


def test_what_rules_multiply_and_pad_arrives(tmp_path: Path, device: str) -> None:
    tensors = {"w": torch.randn(1500, 700), "half": torch.randn(COUNT).half(), "rows": torch.randn(10, 4)}
    torch.save(tensors, tmp_path / "f.pth")
    wanted = [
        rules.transpose("w"),
        rules.scale("w", 0.1),
        rules.scale("half", 1.7),
        rules.cast("half", torch.float32),
        rules.resize("rows", 12, fill=0.3),
    ]
    loaded = sluice.load_state_dict(tmp_path / "f.pth", device=device, rules=wanted)
    assert torch.equal(loaded["w"].cpu(), (tensors["w"] * 0.1).t())
    assert torch.equal(loaded["half"].cpu(), (tensors["half"] * 1.7).float())
    assert torch.equal(loaded["rows"].cpu(), torch.cat([tensors["rows"], torch.full((2, 4), 0.3)]))
