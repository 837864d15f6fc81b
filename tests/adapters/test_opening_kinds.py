from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

import sluice
from support.directories import assert_same, write_peft
from support.trained_net import empty

HALF = [torch.float32, torch.bfloat16, torch.float16]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 6)
        self.block = nn.ModuleDict({"conv": nn.Conv2d(3, 8, 3), "point": nn.Conv2d(8, 4, 1), "seq": nn.Conv1d(4, 6, 3)})
        self.proj_in = nn.Linear(6, 9)
        self.head = nn.Linear(9, 5)


def low_rank(rank: int, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    ones = (1,) * (len(shape) - 2)
    return torch.randn(rank, *shape[1:]), torch.randn(shape[0], rank, *ones)


LOW_RANK = {"head.lora_A.weight": (2, 9)}
#: Patterns as peft documents them; the last one matches.
LAYERS = rf"model\.layers\.({'|'.join(map(str, range(80)))})\.mlp\.down_proj"
PATTERNS = {
    LAYERS: 2,
    "^model.decoder.layers.0.encoder_attn.k_proj": 1,
    r".*\.layers\.(0|1)\..*(q|v)_proj": 2,
    "hea.": 7,
}
HADAMARD = {f"proj_in.hada_{part}": (0,) for part in ("w1_a", "w1_b", "w2_a", "w2_b")}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    torch.manual_seed(5)
    torch.save(Net().state_dict(), tmp_path / "base.pth")
    return tmp_path / "base.pth"


def merged(base: Path, adapters: Any, dtype: torch.dtype = torch.float32) -> tuple[dict[str, Any], sluice.LoadReport]:
    model = empty(Net)
    report = sluice.load_into(model, base, dtype=dtype, adapters=adapters)
    return model.state_dict(), report


@pytest.mark.parametrize("dtype", HALF)
def test_lora_is_added_to_every_kind_of_layer_in_float32(base: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    conv, head = low_rank(2, 8, 3, 3, 3), low_rank(4, 5, 9)
    tokens, bias = (torch.randn(2, 11), torch.randn(6, 2)), torch.randn(5)
    tensors = {
        "block.conv.lora_A.weight": conv[0],
        "block.conv.lora_B.weight": conv[1],
        "head.lora_A.weight": head[0].half(),
        "head.lora_B.weight": head[1].half(),
        "head.lora_B.bias": bias,
        "tokens.lora_embedding_A": tokens[0],
        "tokens.lora_embedding_B": tokens[1],
        "proj_in.weight": torch.ones(9, 6),
    }
    path = write_peft(tmp_path / "a", tensors, rank_pattern={"head": 4}, alpha_pattern=PATTERNS, use_rslora=True)
    want = {name: tensor.to(dtype) for name, tensor in torch.load(base).items()}
    scale, head_scale = 3 / math.sqrt(2), 7 / math.sqrt(4)
    want["block.conv.weight"] += torch.conv2d(conv[0].transpose(0, 1), conv[1]).transpose(0, 1) * scale
    want["head.weight"] += head[1].half().float() @ head[0].half().float() * head_scale
    want["head.bias"] += bias * head_scale
    want["tokens.weight"] += ((tokens[1] @ tokens[0]).T * scale).to(dtype)
    want["proj_in.weight"] = torch.ones(9, 6, dtype=dtype)

    got, report = merged(base, path, dtype)

    assert_same(got, want)
    [one] = report.adapters
    assert (one.kinds, one.scales, one.tensors) == (("replaced", "LoRA", "bias"), (scale, head_scale), 5)
    assert "merged " in str(report)


def test_adapters_are_merged_in_order_with_their_weights(base: Path, tmp_path: Path) -> None:
    pairs = [low_rank(2, 5, 9), low_rank(2, 5, 9)]
    paths = [
        write_peft(tmp_path / str(i), {"head.lora_A.weight": a, "head.lora_B.weight": b})
        for i, (a, b) in enumerate(pairs)
    ]
    want = torch.load(base)["head.weight"].bfloat16()
    want += pairs[0][1] @ pairs[0][0] * 1.5
    want += pairs[1][1] @ pairs[1][0] * (1.5 * 0.5)

    got, _ = merged(base, [paths[0], sluice.Adapter(paths[1], weight=0.5)], torch.bfloat16)

    assert torch.equal(got["head.weight"], want)


@pytest.mark.parametrize(
    ("prefix", "down", "up"),
    [
        ("lora_unet_proj_in", "lora_down.weight", "lora_up.weight"),
        ("diffusion_model.proj_in", "lora_down.weight", "lora_up.weight"),
        ("unet.proj_in", "lora_A.weight", "lora_B.weight"),
        ("text_encoder.text_model.proj_in", "lora.down.weight", "lora.up.weight"),
        ("lora_te_text_model_proj_in", "lora_down.weight", "lora_up.weight"),
        ("lora_unet_proj_in", "lokr_w2_b", "lokr_w2_a"),
    ],
)
def test_files_of_image_models_have_alpha_for_each_layer(
    base: Path, tmp_path: Path, prefix: str, down: str, up: str
) -> None:
    a, b = low_rank(2, 9, 6)
    tensors = {f"{prefix}.{down}": a, f"{prefix}.{up}": b, "other.lora_up.weight": torch.ones(1)}
    tensors |= {f"{prefix}.lokr_w1": torch.ones(1, 1)} if "lokr" in down else {}
    part = prefix.partition(".")[0]
    written = {"lora_adapter_metadata": f'{{"{part}.r": 2, "{part}.lora_alpha": 4}}'}
    others = {"lora_adapter_metadata": '{"vae.r": 2, "vae.lora_alpha": 8}'}
    for alpha, scale, metadata in ((None, 1.0, None), (3.0, 1.5, None), (None, 1.0, others), (None, 2.0, written)):
        more = {} if alpha is None else {f"{prefix}.alpha": torch.tensor(alpha)}
        if more:  # of a different adapter in the directory
            (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2, "lora_alpha": 9}')
        safetensors.torch.save_file(tensors | more, tmp_path / "a.safetensors", metadata)

        got, _ = merged(base, sluice.Adapter(tmp_path / "a.safetensors", prefix=prefix[:4]))

        assert torch.equal(got["proj_in.weight"], torch.load(base)["proj_in.weight"] + b @ a * scale)
    with pytest.raises(sluice.UnsupportedError, match="configurations of their own"):
        merged(base, tmp_path / "a.safetensors")


@pytest.mark.parametrize(
    ("tensors", "config", "problem"),
    [
        (
            {"heads.lora_A.weight": (2, 9), "heads.lora_B.weight": (5, 2)},
            {},
            "without a place in the model: '.*heads' .similar: 'head'",
        ),
        (LOW_RANK, {}, "which are not merged"),
        ({**LOW_RANK, "head.base_layer.lora_A.weight": (2, 9)}, {}, "both mean 'head'"),
        ({"head.lora_A.weight": (3, 9), "head.lora_B.weight": (5, 3)}, {}, "rank of the adapter differs"),
        ({"head.lora_A.weight": (2, 8), "head.lora_B.weight": (5, 2)}, {}, "does not fit 'head.weight'"),
        ({"head.oft_r.weight": (2, 8)}, {"peft_type": "OFT"}, "kind 'OFT' are not merged"),
        (LOW_RANK, {"layer_replication": [[0, 1]]}, "with layer_replication"),
        (LOW_RANK, {"init_lora_weights": "pissa"}, "init_lora_weights='pissa'"),
        (LOW_RANK, {"alpha_pattern": {"(a+)+": 1}}, "pattern"),
        (LOW_RANK, {"alpha_pattern": {".*.*.*.*.*~": 1}}, "pattern"),
        (LOW_RANK, {"alpha_pattern": {f".*.*.*{i}": 1 for i in range(99)}}, "pattern"),
        (LOW_RANK, {"lora_alpha": 10**400}, r"adapter_config\.json: .* too large"),
        (LOW_RANK, {"r": "2"}, "not a positive number"),
        (LOW_RANK, {"rank_pattern": {"l": 0}}, r"adapter_config\.json: .* not a positive number"),
        (LOW_RANK, {"alpha_pattern": {"*l": 8}}, r"adapter_config\.json: .* damaged"),
        (LOW_RANK, {"alpha_pattern": {"a{99999999999999999999}": 8}}, r"adapter_config\.json: .* damaged"),
        (LOW_RANK, {"rank_pattern": [1]}, r"adapter_config\.json: rank_pattern of the adapter is of a wrong type"),
        (LOW_RANK, {"peft_type": ["LORA"]}, r"adapter_config\.json: peft_type of the adapter is of a wrong type"),
        (LOW_RANK, {"modules_to_save": 5}, r"adapter_config\.json: modules_to_save of the adapter is of a wrong type"),
        (HADAMARD, {"peft_type": "LOHA", "r": 4, "alpha": 3}, "rank of the adapter differs"),
        (dict.fromkeys(HADAMARD, ()), None, "rank of the adapter differs"),
        ({f"proj_in.lokr_{part}": () for part in ("w1_a", "w1_b", "w2_a", "w2_b")}, None, "does not fit 'proj_in"),
        ({"proj_in.lokr_w1": (3, 3), "proj_in.lokr_w2": (3, 3)}, None, "does not fit 'proj_in.weight'"),
        ({"proj_in.lokr_w1": (3, 3), "proj_in.lokr_w2_a": (3, 2)}, None, "which are not merged"),
        ({**LOW_RANK, "head.lora_B.weight": (5, 2), "head.alpha": (2,)}, None, "one real number"),
        (
            {"tokens.lora_A.weight": (2, 6), "tokens.lora_B.weight": (11, 2), "tokens.lora_B.bias": (11,)},
            None,
            "no 'tokens.bias'",
        ),
    ],
)
def test_what_cannot_be_merged_is_refused_by_name_and_leaves_the_model(
    base: Path, tmp_path: Path, tensors: dict[str, tuple[int, ...]], config: dict[str, Any] | None, problem: str
) -> None:
    path = write_peft(tmp_path / "a", {name: torch.ones(shape) for name, shape in tensors.items()}, **config or {})
    if config is None:
        (path / "adapter_config.json").unlink()
    model = empty(Net)

    with pytest.raises(sluice.SluiceError, match=problem):
        sluice.load_into(model, base, adapters=path)
    with pytest.raises(sluice.SluiceError, match=problem):
        sluice.convert(base, tmp_path / "new.safetensors", adapters=path)

    assert all(tensor.is_meta for tensor in model.state_dict().values())
    assert not (tmp_path / "new.safetensors").exists()


@pytest.mark.filterwarnings("ignore:.*quantized tensor creation")
@pytest.mark.parametrize("form", ["complex64", "sparse_coo", "quantized"])
def test_factors_are_dense_real_tensors(base: Path, tmp_path: Path, form: str) -> None:
    a, b = low_rank(2, 5, 9)
    forms: dict[str, Callable[[], torch.Tensor]] = {
        "complex64": partial(a.to, torch.complex64),
        "sparse_coo": a.to_sparse,
        "quantized": partial(quantized, a),
    }
    of_form = forms[form]()
    torch.save({"head.lora_A.weight": of_form, "head.lora_B.weight": b}, tmp_path / "a.pth")
    model = Net()

    with pytest.raises(sluice.UnsupportedError, match=f"tensor 'head.lora_A.weight': .* found .*{form}"):
        sluice.load_into(model, base, adapters=tmp_path / "a.pth")


def quantized(tensor: torch.Tensor) -> torch.Tensor:
    return torch.quantize_per_tensor(tensor, 0.1, 0, torch.qint8)


def test_a_live_model_keeps_its_parameters_and_plans_what_it_does(base: Path, tmp_path: Path) -> None:
    a, b = low_rank(2, 5, 9)
    path = write_peft(tmp_path / "a", {"head.lora_A.weight": a, "head.lora_B.weight": b})
    model = Net()
    before = dict(model.named_parameters())

    plan = sluice.plan(model, base, adapters=path)
    report = sluice.load_into(model, base, adapters=path)

    assert plan.adapters == report.adapters
    assert plan.predicted.total_bytes > sluice.plan(model, base).predicted.total_bytes
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    assert torch.equal(model.head.weight, torch.load(base)["head.weight"] + b @ a * 1.5)
    wrapped = Net()
    sluice.load_into(nn.ModuleDict({"module": wrapped}), base, adapters=path)
    assert_same(wrapped.state_dict(), model.state_dict())


@pytest.mark.filterwarnings("ignore:Adapter .default:UserWarning")  # warned by peft
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(
    "kind",
    [
        *({}, {"use_dora": True}, {"lora_bias": True}, {"modules_to_save": ["head"]}, {"bias": "all"}),
        *(("LoHa", {"r": 4}), ("LoKr", {"r": 2}), ("LoKr", {"r": 1, "decompose_both": True}), ("LoKr", {"r": 8})),
    ],
)
def test_the_result_is_that_of_peft(
    base: Path, tmp_path: Path, dtype: torch.dtype, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)  # the first import of peft draws a bar
    peft = pytest.importorskip("peft", reason="peft is not installed")
    if isinstance(kind, tuple):
        config = getattr(peft, f"{kind[0]}Config")(alpha=6, target_modules=["conv", "point", "proj_in"], **kind[1])
    else:
        layers = ["conv", "point", "seq", "proj_in", *([] if "lora_bias" in kind else ["tokens"])]
        config = peft.LoraConfig(r=4, lora_alpha=6, target_modules=layers, **kind)
    trained = peft.get_peft_model(Net(), config)
    for name, parameter in trained.named_parameters():
        if parameter.requires_grad:
            parameter.data = torch.randn_like(parameter) * 0.1 + ("magnitude" in name)
    trained.save_pretrained(tmp_path / "a")
    model = Net().to(dtype)
    model.load_state_dict(torch.load(base))
    want = peft.PeftModel.from_pretrained(model, tmp_path / "a").merge_and_unload().state_dict()

    got, report = merged(base, tmp_path / "a", dtype)
    assert ("DoRA" in report.adapters[0].kinds) == ("use_dora" in kind)
    sluice.convert(base, tmp_path / "b.safetensors", dtype=dtype, adapters=tmp_path / "a")
    assert_same(got, want)
    assert_same(safetensors.torch.load_file(tmp_path / "b.safetensors"), want)


def test_dora_on_a_transposed_weight_has_the_bits_of_the_row_major_one(tmp_path: Path) -> None:
    torch.manual_seed(2)
    weight, (a, b) = torch.randn(160, 160).half(), low_rank(2, 160, 160)
    lora = {"0.lora_A.weight": a, "0.lora_B.weight": b, "0.lora_magnitude_vector": torch.rand(160) * 20}
    path = write_peft(tmp_path / "a", lora, use_dora=True)
    torch.save({"0.weight": weight}, tmp_path / "w.pth")
    torch.save({"0.weight": weight.t().contiguous()}, tmp_path / "turned.pth")
    first, second = (nn.Sequential(nn.Linear(160, 160, bias=False)).half() for _ in range(2))
    sluice.load_into(first, tmp_path / "w.pth", adapters=path)
    sluice.load_into(second, tmp_path / "turned.pth", adapters=path, rules=[sluice.rules.transpose("0.weight")])
    assert torch.equal(first.get_parameter("0.weight"), second.get_parameter("0.weight"))
