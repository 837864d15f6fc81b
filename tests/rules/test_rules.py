"""Each rule on files: its result, its errors, its text in the report, and its arithmetic on accelerators."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

import sluice
from sluice import rules
from sluice._dtypes import dtype_name
from sluice.entries.assembly import compute, pad, permute
from sluice.entries.rules import apply_rules
from sluice.entries.tree import flatten
from sluice.reading.transfer import prepare
from support import plans
from support.dtypes import needs_float4
from support.fake_accelerator import FakeAccelerator
from support.trained_net import empty

Tensors = dict[str, torch.Tensor]


def save(path: Path, tensors: Tensors) -> Path:
    torch.save(tensors, path)
    return path


def load(path: Path, applied: Sequence[rules.Rule], **options: object) -> Tensors:
    return dict(sluice.load_state_dict(path, rules=applied, **options))  # type: ignore[arg-type]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    tensors = {
        **{f"h.{i}.qkv.weight": torch.randn(4, 6) for i in range(12)},
        **{f"h.{i}.qkv.bias": torch.randn(6) for i in range(12)},
        **{f"experts.{i}.w": torch.full((2, 3), float(i)) for i in (10, 2, 0, 1, 3, 4, 5, 6, 7, 8, 9)},
        "wte": torch.randn(10, 4),
        "ids": torch.arange(10),
        "half": torch.randn(50).half(),
    }
    return save(tmp_path / "f.pth", tensors)


def test_rename_by_name_by_prefix_and_by_regular_expression(file: Path) -> None:
    before = torch.load(file)
    made = load(
        file,
        [
            rules.rename("wte", "tok_emb.weight"),
            rules.rename("experts.**", "moe.**"),
            rules.rename("h.*.qkv.*", "blocks.*.attn.*"),
            rules.rename(re.compile(r"blocks\.(\d+)\.attn\.(?P<kind>\w+)"), r"\g<kind>_\1"),
        ],
    )
    assert torch.equal(made["tok_emb.weight"], before["wte"])
    assert torch.equal(made["moe.10.w"], before["experts.10.w"])
    assert torch.equal(made["weight_11"], before["h.11.qkv.weight"])
    assert len(made) == len(before)
    assert list(made)[:2] == ["weight_0", "weight_1"]


def test_a_wildcard_is_a_part_of_one_component(file: Path) -> None:
    dropped = [*map(rules.drop, ("h.1*.qkv.weight", "**bias", "exp*s.*.w", "ids*"))]
    kept = load(file, [*dropped, rules.drop("nothing.*", optional=True)])
    assert {name.split(".")[1] for name in kept if name.startswith("h.")} == {"0", *"23456789"}
    assert list(kept)[-2:] == ["wte", "half"]


def test_two_names_may_be_swapped_and_a_copy_shares_bytes(file: Path) -> None:
    before = torch.load(file)
    swapped = load(file, [rules.rename("wte", "x"), rules.rename("half", "wte"), rules.rename("x", "half")])
    assert torch.equal(swapped["half"], before["wte"])
    assert torch.equal(swapped["wte"], before["half"])
    copied = load(file, [rules.copy("wte", "head")])
    assert torch.equal(copied["head"], before["wte"])
    assert copied["head"].data_ptr() == copied["wte"].data_ptr()


def test_a_fused_weight_is_split_and_joined_again(file: Path) -> None:
    before = torch.load(file)
    names = ("h.*.q.weight", "h.*.k.weight", "h.*.v.weight")
    apart = [rules.transpose("h.*.qkv.weight"), rules.split("h.*.qkv.weight", iter(names))]  # type: ignore[arg-type]
    made = load(file, apart)
    for i in range(12):
        for name, expected in zip("qkv", before[f"h.{i}.qkv.weight"].t().chunk(3), strict=True):
            assert torch.equal(made[f"h.{i}.{name}.weight"], expected)
    back = load(file, [*apart, rules.concatenate(names, "h.*.qkv.weight"), rules.transpose("h.*.qkv.weight")])
    assert list(back) == list(before)
    for name, tensor in before.items():
        assert torch.equal(back[name], tensor)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_columns_of_which_each_becomes_a_tensor_are_read_once(tmp_path: Path, dtype: torch.dtype | None) -> None:
    path = save(tmp_path / "f.pth", {"w": torch.zeros(1024, 3072)})
    model = nn.ParameterDict({name: torch.empty(1024, 1024, device="meta") for name in "qkv"})
    report = sluice.load_into(model, path, rules=[rules.split("w", tuple("qkv"), dim=1)], dtype=dtype)
    assert report.read_bytes <= 1.01 * path.stat().st_size


def test_numbers_give_the_order_of_a_stack(file: Path) -> None:
    stacked = load(file, [rules.stack("experts.#.w", "experts.w")])["experts.w"]
    assert torch.equal(stacked[:, 0, 0], torch.arange(11.0))
    along = load(file, [rules.concatenate("experts.#.w", "experts.w", dim=-1)])["experts.w"]
    assert along.shape == (2, 33)


@pytest.mark.parametrize("name", ["bfloat16", torch.float64])
def test_cast_decides_the_dtype(file: Path, name: torch.dtype | str) -> None:
    made = load(file, [rules.cast("wte", name), rules.cast("ids", "int32")], dtype=torch.float16)
    dtype = name if isinstance(name, torch.dtype) else getattr(torch, name)
    assert torch.equal(made["wte"], torch.load(file)["wte"].to(dtype))
    assert made["ids"].dtype == torch.int32
    assert made["h.0.qkv.bias"].dtype == torch.float16


def test_arithmetic_follows_the_negation_of_a_view(tmp_path: Path) -> None:
    negative = torch.randn(4, dtype=torch.complex64).conj().imag
    torch.save({"n": negative}, tmp_path / "f.pth")
    sluice.convert(tmp_path / "f.pth", tmp_path / "made.pth", rules=[rules.add("n", 1.0)])
    for made in (load(tmp_path / "f.pth", [rules.add("n", 1.0)]), torch.load(tmp_path / "made.pth")):
        assert torch.equal(made["n"], negative + 1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("finished", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("factor", [0.1, -3.0, 2**-20, 1e30])
def test_scale_is_torchs_product_bit_for_bit(
    tmp_path: Path, dtype: torch.dtype, finished: torch.dtype | None, factor: float
) -> None:
    torch.manual_seed(1)
    tensors = {"large": torch.randn(300, 401).to(dtype), "scalar": torch.randn(()).to(dtype)}
    tensors["view"] = tensors["large"][:200].t()
    path = save(tmp_path / "f.pth", tensors)
    made = load(path, [rules.scale("**", factor), rules.scale("view", 0.7)], dtype=finished)
    for name, tensor in tensors.items():
        expected = tensor * factor * 0.7 if name == "view" else tensor * factor
        assert torch.equal(made[name], expected.to(finished or dtype)), name


def test_a_vocabulary_is_cut_and_padded(file: Path) -> None:
    before = torch.load(file)["wte"]
    assert torch.equal(load(file, [rules.resize("wte", 7)])["wte"], before[:7])
    assert torch.equal(load(file, [rules.resize("wte", 10)])["wte"], before)
    padded = load(file, [rules.resize("wte", 13, fill=0.1), rules.scale("wte", 3), rules.transpose("wte")])["wte"]
    assert torch.equal(padded, (torch.cat([before, torch.full((3, 4), 0.1)]) * 3).t())
    ids = load(file, [rules.resize("ids", 12, fill=-1)])["ids"]
    assert ids.tolist() == [*range(10), -1, -1]
    only = load(file, [rules.resize("ids", 12, fill=5), rules.split("ids", ("a", "b"), sizes=iter((11, 1)))])["b"]  # type: ignore[arg-type]
    assert only.tolist() == [5]


@needs_float4
def test_pairs_of_four_bits_are_padded_with_zeros(tmp_path: Path) -> None:
    path = save(tmp_path / "a.pth", {"w": torch.tensor([7, 9], dtype=torch.uint8).view(torch.float4_e2m1fn_x2)})
    assert load(path, [rules.resize("w", 4)])["w"].view(torch.uint8).tolist() == [7, 9, 0, 0]


@pytest.mark.parametrize("live", [False, True])
def test_padding_reaches_live_tensors_too(file: Path, live: bool) -> None:
    before = torch.load(file)["wte"]
    model = nn.Embedding(14, 4)
    nn.init.constant_(model.weight, 7.0)
    place = model.weight.data_ptr()
    if not live:
        model = empty(lambda: nn.Embedding(14, 4))
    wanted = [rules.rename("wte", "weight"), rules.resize("weight", 14), rules.drop(re.compile("(?!weight).*"))]
    report = sluice.load_into(model, file, rules=wanted)
    assert torch.equal(model.weight[:10], before)
    assert model.weight[10:].count_nonzero() == 0
    assert (model.weight.data_ptr() == place) is live
    assert report.origins == {"weight": "wte padded with 0 to 14 rows"}
    assert "produced by rules (1): weight = wte padded with 0 to 14 rows" in str(report)


def test_rules_and_pages_of_the_file(tmp_path: Path) -> None:
    tensors = {"fused": torch.randn(6, 2), "vocabulary": torch.randn(5, 3), "scaled": torch.randn(4)}
    path = tmp_path / "f.safetensors"
    safetensors.torch.save_file(tensors, path)
    with torch.device("meta"):
        model = nn.ParameterDict({"q": torch.empty(3, 2), "k": torch.empty(3, 2)})
        model.update({"vocabulary": torch.empty(7, 3), "scaled": torch.empty(4)})
    wanted = [
        rules.split("fused", ("q", "k")),
        rules.resize("vocabulary", 7),
        rules.scale("scaled", 0.1),
    ]
    report = sluice.load_into(model, path, rules=wanted, place="map")
    assert torch.equal(torch.cat([model["q"], model["k"]]), tensors["fused"])
    assert torch.equal(model["vocabulary"], torch.cat([tensors["vocabulary"], torch.zeros(2, 3)]))
    assert torch.equal(model["scaled"], tensors["scaled"] * 0.1)
    [copied] = [note for note in report.notes if "are copied" in note]
    assert "1 computed" in copied
    assert "1 assembled from parts" in copied


def test_a_tensor_of_constants_alone_needs_no_read(tmp_path: Path) -> None:
    path = save(tmp_path / "f.pth", {"w": torch.ones(2, 3), "none": torch.empty(0, 3)})
    made = load(path, [rules.resize("none", 4, fill=2.5), rules.drop("w")])
    assert torch.equal(made["none"], torch.full((4, 3), 2.5))


def test_other_values_of_a_state_dict_stay(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2, 3), "step": 3, "inner": {"b": torch.zeros(2)}}, tmp_path / "f.pth")
    made = sluice.load_state_dict(tmp_path / "f.pth", rules=[rules.rename("inner.b", "b")])
    assert made["step"] == 3
    assert list(made) == ["w", "b", "step"]
    with pytest.raises(sluice.MismatchError, match="a different value"):
        sluice.load_state_dict(tmp_path / "f.pth", rules=[rules.rename("inner.b", "step")])


def test_rules_follow_rename_and_see_the_chosen_part(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    torch.save(
        {"ema": {"w": model.weight.t().contiguous(), "b": model.bias}, "x": {"y": torch.ones(9)}}, tmp_path / "f"
    )
    loaded = nn.Linear(3, 2)
    report = sluice.load_into(
        loaded,
        tmp_path / "f",
        rename={"w": "kernel"},
        rules=[rules.transpose("kernel"), rules.rename("kernel", "weight"), rules.rename("b", "bias")],
    )
    assert torch.equal(loaded.weight, model.weight)
    assert report.key == "ema"
    assert report.origins == {"weight": "kernel transposed", "bias": "b"}


def message(path: Path, *applied: rules.Rule) -> str:
    with pytest.raises(sluice.MismatchError) as caught:
        load(path, applied)
    return str(caught.value)


def test_errors_name_all_tensors_that_a_rule_cannot_be_applied_to_and_similar_names(file: Path) -> None:
    text = message(file, rules.drop("wte"), rules.transpose("h.0.qvk.weight"))
    assert "no tensors" in message(file, rules.drop(re.compile(".*")), rules.cast("w", "float32"))
    assert "transpose('h.0.qvk.weight') matches no tensor" in text
    assert "'h.0.qkv.weight'" in text
    text = message(file, rules.rename("ids", "wte"))
    assert "tensor 'wte'" in text
    assert "'wte' and 'ids'" in text
    assert "to (23):\n    'same': two tensors" in message(file, rules.rename(re.compile(r"h\..*"), "same"))
    text = message(file, rules.transpose("h.*.qkv.*"))
    assert "to (12):" in text
    assert "'h.11.qkv.bias': it has no dimension 1: its shape is [6]" in text
    assert "number 4 of 'experts.#.w'" in message(file, rules.drop("experts.4.w"), rules.stack("experts.#.w", "all"))


@pytest.mark.parametrize(
    ("rule", "reason"),
    [
        (rules.transpose("ids"), "no dimension 1"),
        (rules.permute("wte", (0, 0)), "must name each of the 2 dimensions once"),
        (rules.reshape("wte", (7, -1)), r"40 elements of shape \[10, 4\] do not fit \[7, -1\]"),
        (rules.split("wte", ("a", "b", "c")), "do not split into 3 equal sizes"),
        (rules.split("wte", ("a", "b"), sizes=(3, 8)), r"sizes \[3, 8\]"),
        (rules.concatenate(("wte", "half"), "x"), "shapes|dtypes"),
        (rules.stack(("wte", "h.0.qkv.weight"), "x"), "differ"),
        (
            rules.concatenate(("h.*.qkv.weight", "h.*.other"), "h.*.x"),
            "a tensor is missing: no name matches 'h.[*].other'",
        ),
        (rules.scale("ids", 2), "int64 cannot be multiplied"),
        (rules.add("ids", 1), "int64 cannot be added to"),
        (rules.resize("ids", 20, fill=0.5), "int64 cannot hold 0.5"),
        (rules.resize("ids", 20, fill=float("inf")), "int64 cannot hold inf"),
        (rules.cast("wte", "float4_e2m1fn_x2"), "no cast"),
        (rules.rename(re.compile("wte"), r"\3"), "does not fit"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_cannot_be_done_names_the_rule_the_tensor_and_the_reason(
    file: Path, rule: rules.Rule, reason: str
) -> None:
    text = message(file, rule)
    assert re.search(reason, text), text
    assert str(rule) in text
    assert "tensor '" in text


@pytest.mark.parametrize(
    ("error", "make"),
    [
        (ValueError, lambda: rules.rename("a.*", "b")),
        (ValueError, lambda: rules.rename("a.*.**", "b.**.*")),
        (ValueError, lambda: rules.drop("a.#")),
        (ValueError, lambda: rules.split("a.*", ("b", "c.*"))),
        (ValueError, lambda: rules.split("a", ("b", "c"), sizes=(1,))),
        (ValueError, lambda: rules.cast("a", "float12")),
        (ValueError, lambda: rules.reshape("a", (-1, -1))),
        (ValueError, lambda: rules.resize("a", -1)),
        (ValueError, lambda: rules.megatron("core", vocabulary=0)),
        (ValueError, lambda: rules.concatenate((), "a")),
        (ValueError, lambda: rules.stack("a.#.#", "a")),
        (TypeError, lambda: rules.resize("a", 6.0)),  # type: ignore[arg-type]
        (TypeError, lambda: rules.reshape("a", (2.0, 4))),  # type: ignore[arg-type]
        (TypeError, lambda: rules.split("a", ("b", "c"), sizes=(1.5, 2.5))),  # type: ignore[arg-type]
        (TypeError, lambda: rules.permute("a", (1.0, 0))),  # type: ignore[arg-type]
        (TypeError, lambda: rules.stack("a.#", "a", dim=0.0)),  # type: ignore[arg-type]
    ],
)
def test_what_no_checkpoint_could_satisfy_is_refused_when_the_rule_is_made(
    error: type[Exception], make: Callable[[], rules.Rule]
) -> None:
    """Sizes and dimensions are integers."""
    with pytest.raises(error, match="integer" if error is TypeError else "."):
        make()


def test_numbers_of_thousands_of_digits_do_not_match(tmp_path: Path) -> None:
    path = save(tmp_path / "f.pth", {name % ("9" * 5000): torch.ones(2) for name in ("e.%s.w", "mp_rank_%s.w")})
    for rule in (rules.stack("e.#.w", "e.w"), rules.megatron("core")):
        assert "matches no tensor" in message(path, rule)


def test_rules_are_values_and_others_are_type_errors(file: Path) -> None:
    assert rules.transpose("a.*") == rules.transpose("a.*")
    assert len({rules.cast("a", torch.float16), rules.cast("a", "float16")}) == 1
    assert sluice.rules is rules
    with pytest.raises(TypeError, match=r"rules\[0\]"):
        sluice.load_state_dict(file, rules=[("a", "b")])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="pattern"):
        rules.drop(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="must be a sequence of names"):
        rules.split("a", "bc")


def test_a_mismatch_names_the_sources_of_a_tensor_produced_by_rules(file: Path) -> None:
    with pytest.raises(sluice.MismatchError) as caught:
        sluice.load_into(
            nn.Linear(4, 5),
            file,
            rules=[
                rules.rename("wte", "weight"),
                rules.transpose("weight"),
                rules.rename("h.0.qkv.bias", "bias"),
                rules.drop(re.compile("(?!weight|bias).*")),
            ],
        )
    text = str(caught.value)
    assert (
        "'weight' is [5, 4] in the module, [4, 10] in the checkpoint; produced by rules from 'wte transposed'" in text
    )
    assert "'bias' is [5] in the module, [6] in the checkpoint; produced by rules from 'h.0.qkv.bias'" in text


def test_if_rules_apply_to_no_candidate_the_error_is_that_of_the_largest(tmp_path: Path) -> None:
    torch.save({"ema": {"w": torch.ones(3)}, "model": {"w": torch.ones(3), "b": torch.ones(3)}}, tmp_path / "f.pth")
    with pytest.raises(sluice.MismatchError, match=r"matches no tensor.*'[wb]', '[wb]'"):
        sluice.load_into(nn.Linear(1, 3), tmp_path / "f.pth", rules=[rules.drop("x.0")])


def test_a_reshape_that_strides_cannot_express_takes_boxes_up_to_a_limit(tmp_path: Path) -> None:
    whole = torch.arange(5000.0 * 3).view(5000, 3)
    path = save(tmp_path / "f.pth", {"w": whole, "narrow": whole[:60].contiguous()})
    made = load(path, [rules.transpose("narrow"), rules.reshape("narrow", (-1,)), rules.drop("w")])["narrow"]
    assert torch.equal(made, whole[:60].t().reshape(-1))
    text = message(path, rules.reshape("w", (3, 5000)), rules.transpose("w"), rules.reshape("w", (-1,)))
    assert "more than 4096 boxes" in text
    assert "tensor 'w'" in text


def test_the_plan_lists_the_sources_of_each_target(file: Path) -> None:
    wanted = [rules.transpose("wte"), rules.split("wte", ("a", "b"), dim=1), rules.cast("a", "bfloat16")]
    with sluice.open(file) as checkpoint:
        made = apply_rules(checkpoint.entries, wanted)
        requests = [plans.request(name, made[name]) for name in ("a", "b", "ids")]
        plan = prepare(checkpoint, requests).plan
    assert [target.origin for target in plan.targets] == [
        "wte transposed, columns 0:5 cast to bfloat16",
        "wte transposed, columns 5:10",
        "",
    ]


def test_a_reshape_of_aligned_parts_stays_whole(tmp_path: Path) -> None:
    path = save(tmp_path / "f.pth", {"a": torch.zeros(6, 4), "b": torch.ones(6, 4)})
    wanted = [rules.concatenate(("a", "b"), "ab"), rules.reshape("ab", (2, 6, 4)), rules.permute("ab", (1, 0, 2))]
    with sluice.open(path) as checkpoint:
        [entry] = apply_rules(flatten(checkpoint.index.tree, checkpoint.limits), wanted).values()
    assert len(entry.parts) == 2
    assert entry.origin == "concatenation of (a; b) in dimension 0 reshaped to [2, 6, 4] permuted to [1, 0, 2]"


@pytest.mark.parametrize("cores", [2, 16])  # with many, the host casts to narrower dtypes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_and_constants_arrive(tmp_path: Path, dtype: torch.dtype, cores: int) -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(700, 500), torch.randn(3, 4), torch.randn(plans.MIB), torch.empty(0, 2)]
    entries = [plans.entry_of(tensor, i) for i, tensor in enumerate(tensors)]
    wanted = [
        permute(compute(entries[0], "mul", 0.1), (1, 0)),
        compute(pad(entries[1], 0, 5, 0.3), "add", 3.3),
        compute(compute(entries[2], "mul", 1.7), "add", -0.3),
        pad(entries[3], 0, 4, 2.5),
    ]
    requests = [
        plans.request(f"t{i}", entry, device="fake:0", dtype=dtype_name(dtype), stride=None)
        for i, entry in enumerate(wanted)
    ]
    loaded = plans.load(tmp_path / "f", tensors, requests, shift=2, fake=FakeAccelerator(), cores=cores)
    expected = [
        (tensors[0] * 0.1).t(),
        torch.cat([tensors[1], torch.full((2, 4), 0.3)]) + 3.3,
        tensors[2] * 1.7 - 0.3,
        torch.full((4, 2), 2.5),
    ]
    for ours, theirs in zip(loaded, expected, strict=True):
        assert torch.equal(ours, theirs.to(dtype))
