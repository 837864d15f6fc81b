"""Merges of files: what is computed, from which tensors, where it goes, and what is refused."""

from __future__ import annotations

import errno
import json
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

import sluice
from sluice.merging import source as _source
from support import gguf_files
from support.directories import assert_same
from support.range_server import RangeServer
from support.system_calls import Injection, failing
from support.trained_net import empty, unchanged
from support.watching import watch

State = dict[str, torch.Tensor]


def states(count: int, *, layers: int = 3, seed: int = 0) -> list[State]:
    generator = torch.Generator().manual_seed(seed)
    names = [
        "model.embed.weight",
        *(f"model.layers.{i}.{part}" for i in range(layers) for part in ("q", "mlp")),
        "norm",
    ]
    return [
        {**{name: torch.randn(12, 5, generator=generator) for name in names}, "steps": torch.tensor(3)}
        for _ in range(count)
    ]


def written(folder: Path, found: list[State]) -> list[str]:
    """Write inputs of different formats; return their paths."""
    folder.mkdir(exist_ok=True)
    torch.save({"model": found[0], "epoch": 1}, folder / "a.pth")
    safetensors.torch.save_file(found[1], folder / "b.safetensors")
    paths = [str(folder / "a.pth"), str(folder / "b.safetensors")]
    for number, state in enumerate(found[2:], 2):
        sluice.save(state, folder / str(number), max_shard_size="1KB")
        paths.append(str(folder / str(number)))
    return paths


def linear(found: list[State], weights: list[float]) -> State:
    result = {}
    for name, first in found[0].items():
        total = torch.zeros_like(first, dtype=torch.float32)
        for state, weight in zip(found, weights, strict=True):
            total.addcmul_(state[name].float(), torch.tensor(weight))
        result[name] = (total / torch.tensor(weights).sum()).to(first.dtype) if first.is_floating_point() else first
    return result


@pytest.mark.parametrize("out", ["out.pth", "out.safetensors", "out"])
def test_weights_by_path(tmp_path: Path, out: str) -> None:
    found = states(3)
    weights = dict(zip(written(tmp_path, found), [0.2, 0.3, 0.9], strict=True))
    report = sluice.merge(weights, tmp_path / out)
    assert isinstance(report, sluice.SaveReport)
    assert report.tensors == len(found[0])
    assert_same(sluice.load_state_dict(tmp_path / out), linear(found, [0.2, 0.3, 0.9]))
    planned = sluice.merge(weights, tmp_path / "half.pth", dtype="bf16", dry_run=True)
    assert isinstance(planned, sluice.SaveReport)
    assert planned.casts == {"float32 -> bfloat16": 8}
    assert not (tmp_path / "half.pth").exists()


def test_into_a_module(tmp_path: Path) -> None:
    models = [nn.Linear(7, 9) for _ in range(3)]
    paths = [str(tmp_path / f"{i}.pth") for i in range(3)]
    for model, path in zip(models, paths, strict=True):
        torch.save({"state_dict": model.state_dict()}, path)
    average = torch.optim.swa_utils.AveragedModel(models[0])
    for model in models:
        average.update_parameters(model)
    merged = empty(lambda: nn.Linear(7, 9))
    report = sluice.merge(paths, merged, key="state_dict")
    assert isinstance(report, sluice.LoadReport)
    assert torch.allclose(merged.weight, average.module.get_parameter("weight"))
    with pytest.raises(ValueError, match="for files"):
        sluice.merge(paths, merged, overwrite=True)


@pytest.mark.parametrize("seed", range(8))
def test_pieces_of_views_of_any_layout(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    random = Random(seed)
    monkeypatch.setattr(_source, "_PIECE_BYTES", random.choice([8, 100, 1 << 20]))
    found: list[State] = []
    for _ in range(random.randrange(1, 4)):
        state: State = {"scalar": torch.tensor(1.5), "empty": torch.zeros(0, 3)}
        for number in range(6):
            whole = torch.randn(random.randrange(1, 30), 8).to(random.choice([torch.float32, torch.float64]))
            shape = [9, 4]
            state[f"w{number}"] = torch.as_strided(
                whole.repeat(9, 9), shape, random.choice([[8, 1], [1, 9], [8, 2]]), 3
            )
        found.append(state)
    paths = [str(tmp_path / f"{i}.pth") for i in range(len(found))]
    for state, path in zip(found, paths, strict=True):
        torch.save(state, path)
    sluice.merge(paths, tmp_path / "out.pth", method="ema", parameters={"decay": 0.75})
    merged = sluice.load_state_dict(tmp_path / "out.pth")
    for name in found[0]:
        wide = torch.float64 if any(state[name].dtype == torch.float64 for state in found) else torch.float32
        expected = found[0][name].to(wide).clone()
        for state in found[1:]:
            expected.lerp_(state[name].to(wide), 0.25)
        assert torch.equal(merged[name], expected), name


def test_a_configuration_of_slices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("yaml", reason="the extra 'merge' is not installed")
    monkeypatch.chdir(tmp_path)
    one, other = found = states(2, layers=4)
    for name in ("embed_out.weight", "vision.0.bias"):  # in no layer of the model
        one[name], other[name] = torch.zeros(1), torch.ones(1)
    for name, state in zip("ab", found, strict=True):
        sluice.save(state, name)
    Path("join.yml").write_text(
        "merge_method: passthrough\nslices:\n  - sources: [{model: a, layer_range: [0, 3]}]\n"
        "  - sources: [{model: b, layer_range: [1, 4], parameters: {scale: [{filter: mlp, value: 0.5}]}}]\n"
    )
    sluice.merge("join.yml", "joined")
    joined = sluice.load_state_dict("joined")
    assert len([name for name in joined if name.endswith(".q")]) == 6
    assert torch.equal(joined["model.layers.2.q"], one["model.layers.2.q"])
    assert torch.equal(joined["model.layers.3.q"], other["model.layers.1.q"])
    assert torch.equal(joined["model.layers.5.mlp"], other["model.layers.3.mlp"] * 0.5)
    assert torch.equal(joined["model.embed.weight"], one["model.embed.weight"])
    assert all(torch.equal(joined[name], other[name]) for name in ("norm", "embed_out.weight", "vision.0.bias"))
    weight = {"weight": [{"filter": ".q", "value": [0, 1, 5]}, {"value": 1}]}
    models = [{"model": "a", "parameters": weight}, {"model": "b", "parameters": {"weight": "1e0"}}]
    sluice.merge({"merge_method": "linear", "models": models, "parameters": {"normalize": False}}, "sum.pth")
    summed = torch.load("sum.pth")
    for layer, factor in enumerate((0, 2 / 3, 7 / 3, 5)):
        expected = one[f"model.layers.{layer}.q"] * factor + other[f"model.layers.{layer}.q"]
        assert torch.allclose(summed[f"model.layers.{layer}.q"], expected)


def test_packs_are_read_as_a_whole_wherever_a_piece_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_source, "_PIECE_BYTES", 1000)
    for i, name in enumerate("ab"):
        tensors = {"bias": gguf_files.plain(torch.full((101,), float(i))), "w": gguf_files.packed((16, 96), seed=i)[0]}
        gguf_files.write(tmp_path / f"{name}.gguf", tensors)
    sluice.merge([tmp_path / "a.gguf", tmp_path / "b.gguf"], tmp_path / "m.safetensors")
    one, other = (gguf_files.packed((16, 96), seed=i)[1] for i in (0, 1))
    assert torch.equal(sluice.load_state_dict(tmp_path / "m.safetensors")["w"].float(), one.lerp(other, 0.5))


@pytest.mark.parametrize("copies", [None, 0, 1])
def test_both_names_of_a_tied_tensor_have_the_same_draws(tmp_path: Path, copies: int | None) -> None:
    paths = [str(tmp_path / f"{i}.pth") for i in range(2)]
    for i, path in enumerate(paths):
        weight = torch.randn(30, 40)
        torch.save({"head.weight": weight, "wte.weight": weight.clone() if i == copies else weight}, path)
    sluice.merge(
        {paths[0]: 1, paths[1]: 1}, tmp_path / "m.pth", method="dare_ties", base=paths[0], parameters={"density": 0.5}
    )
    found = sluice.load_state_dict(tmp_path / "m.pth")
    assert torch.equal(found["head.weight"], found["wte.weight"])


NOT_YAML, REPEATS = "is not YAML", "repeats its parts too often"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        *((text, NOT_YAML) for text in ("!!bool x", "a: !!int ''", "a: !!timestamp x")),
        pytest.param(f"s: [&s [&a {{model: a}}{800 * ', *a'}]{800 * ', *s'}]", REPEATS, id="a product of aliases"),
        pytest.param("s: &s [*s, *s]", REPEATS, id="a cycle"),
    ],
)
def test_files_that_are_no_configuration_are_refused(tmp_path: Path, text: str, problem: str) -> None:
    pytest.importorskip("yaml", reason="the extra 'merge' is not installed")
    (tmp_path / "config.yml").write_text(text)
    with pytest.raises(sluice.FormatError, match=problem):
        sluice.merge(tmp_path / "config.yml", tmp_path / "out")


def test_a_configuration_in_json_needs_no_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    paths = written(tmp_path, states(2))
    weights = [{"model": path, "parameters": {"weight": 1e-3}} for path in paths]
    (tmp_path / "config.json").write_text(json.dumps({"merge_method": "linear", "models": weights}))
    sluice.merge(tmp_path / "config.json", tmp_path / "one.safetensors")
    sluice.merge(dict.fromkeys(paths, 1e-3), tmp_path / "other.safetensors")
    assert (tmp_path / "one.safetensors").read_bytes() == (tmp_path / "other.safetensors").read_bytes()
    (tmp_path / "config.json").write_text("models: []")
    with pytest.raises(sluice.FormatError, match=r"not strict JSON.* Correct the configuration"):
        sluice.merge(tmp_path / "config.json", tmp_path / "out")


def test_inputs_are_sources_of_any_kind(tmp_path: Path) -> None:
    pytest.importorskip("urllib3", reason="the extra 'remote' is not installed")
    a, b, c = written(tmp_path, states(3))
    with RangeServer({"/b": Path(b).read_bytes()}) as server, sluice.open(c) as checkpoint:
        inputs: list[Any] = [sluice.Patched(a), sluice.Remote(server.url("/b")), checkpoint]
        sluice.merge(inputs, tmp_path / "swa.pth")
        sluice.merge(
            {inputs[0]: 0.5, inputs[1]: 1.0}, tmp_path / "task.pth", method="task_arithmetic", base=sluice.Patched(c)
        )
    sluice.merge([a, b, c], tmp_path / "swa.safetensors")
    sluice.merge({a: 0.5, b: 1.0}, tmp_path / "task.safetensors", method="task_arithmetic", base=c)
    for name in ("swa", "task"):
        assert_same(torch.load(tmp_path / f"{name}.pth"), safetensors.torch.load_file(tmp_path / f"{name}.safetensors"))


def test_parts_of_one_file_are_different_inputs(tmp_path: Path) -> None:
    torch.save({"model": {"weight": torch.zeros(1, 2)}, "ema": {"weight": torch.full((1, 2), 6.0)}}, tmp_path / "a.pth")
    merged = nn.Linear(2, 1, bias=False)
    with sluice.open(tmp_path / "a.pth", key="model") as one, sluice.open(tmp_path / "a.pth", key="ema") as other:
        for inputs, base in (([one, other], None), ([other], one)):
            sluice.merge(inputs, merged, base=base)
            assert torch.equal(merged.weight, torch.full((1, 2), 3.0))
        with pytest.raises(sluice.FormatError, match="twice an input"):
            sluice.merge([one, one], merged)
        sluice.merge({one: 0.5, other: 0.5}, merged)
        assert torch.equal(merged.weight, torch.full((1, 2), 3.0))


def test_versions_and_extra_state_are_those_of_the_first_input(tmp_path: Path) -> None:
    state = nn.BatchNorm1d(2).state_dict()
    state["_extra_state"] = {"steps": 3}
    torch.save(state, tmp_path / "a.pth")
    torch.save(state, tmp_path / "b.pth")
    sluice.merge([tmp_path / "a.pth", tmp_path / "b.pth"], tmp_path / "merged.pth")
    merged = torch.load(tmp_path / "merged.pth")
    assert merged["_extra_state"] == {"steps": 3}
    assert merged._metadata == {"": {"version": 2}}
    assert merged.keys() == state.keys()


@pytest.fixture(scope="module")
def in_two_stores() -> list[sluice.Remote]:
    """Return two files of one name; the process keeps the event loop of obstore."""
    obstore = pytest.importorskip("obstore", reason="the extra 'remote' is not installed")
    stores = [obstore.store.MemoryStore() for _ in range(2)]
    for value, store in zip((0.0, 6.0), stores, strict=True):
        obstore.put(store, "a.safetensors", safetensors.torch.save({"weight": torch.full((1, 2), value)}))
    return [sluice.Remote("a.safetensors", store=store) for store in stores]


def test_equal_names_in_two_stores_are_different_inputs(in_two_stores: list[sluice.Remote]) -> None:
    merged = nn.Linear(2, 1, bias=False)
    sluice.merge(in_two_stores[1:], merged, base=in_two_stores[0])
    assert torch.equal(merged.weight, torch.full((1, 2), 3.0))
    same = sluice.Remote("a.safetensors", store=in_two_stores[0].store)
    sluice.merge(in_two_stores, merged, method="slerp", base=same, parameters={"t": 1.0})
    assert torch.allclose(merged.weight, torch.full((1, 2), 6.0))


def sliced(*slices: list[dict[str, Any]]) -> dict[str, Any]:
    return {"merge_method": "linear", "slices": [{"sources": sources} for sources in slices]}


def test_tensors_of_a_later_slice_are_not_lost(tmp_path: Path) -> None:
    one, other = states(2, layers=2)
    one |= {f"model.layers.{'9' * 5000}.bias": torch.ones(5)}  # not a layer
    other |= {f"model.layers.{i}.bias": torch.ones(5) for i in range(2)}
    a, b = written(tmp_path, [one, other])
    config = sliced([{"model": a, "layer_range": [0, 1]}], [{"model": b, "layer_range": [1, 2]}])
    with pytest.raises(sluice.MismatchError, match=r"layers\.0\.bias is not in .*a\.pth"):
        sluice.merge(config, tmp_path / "out.pth")


def test_dtypes(tmp_path: Path) -> None:
    a, b = (str(tmp_path / f"{name}.pth") for name in "ab")
    torch.save({"w": torch.full((4,), 1.5).to(torch.float8_e4m3fn), "n": torch.tensor(3)}, a)
    torch.save({"w": torch.full((4,), 2.5), "n": torch.tensor(3)}, b)
    for paths in ([a, a.replace("a.pth", "./a.pth")], [a, b]):
        with pytest.raises(sluice.UnsupportedError, match=r"does not compute with .*float8_e4m3fn"):
            sluice.merge(paths, tmp_path / "out.pth")
    config = {"merge_method": "swa", "models": [{"model": a}, {"model": b}], "dtype": "bf16"}
    sluice.merge(config, tmp_path / "out.pth")
    assert torch.equal(torch.load(tmp_path / "out.pth")["w"], torch.full((4,), 2.0, dtype=torch.bfloat16))
    assert torch.load(tmp_path / "out.pth")["n"].dtype == torch.int64
    sluice.merge([a], tmp_path / "same.pth", method="passthrough")
    assert torch.load(tmp_path / "same.pth")["w"].dtype == torch.float8_e4m3fn


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("nested", [False, True])
def test_sparse_and_nested_tensors_are_refused_by_name(tmp_path: Path, nested: bool) -> None:
    refused = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]) if nested else torch.eye(3).to_sparse()
    torch.save({"v": torch.ones(3), "w": refused}, tmp_path / "a.pth")
    with pytest.raises(sluice.UnsupportedError, match="a nested tensor" if nested else "is not merged") as caught:
        sluice.merge([tmp_path / "a.pth"], tmp_path / "out.pth")
    assert (caught.value.file, caught.value.tensor) == (str(tmp_path / "a.pth"), "w")


def test_methods_of_whole_tensors_are_held_against_the_limit(tmp_path: Path) -> None:
    paths = [str(tmp_path / f"{i}.pth") for i in range(3)]
    for path in paths:
        torch.save({"w": torch.randn(512, 1024)}, path)
    memory = sluice.MemoryLimits(host="88MiB")  # staging and 24 MiB, for three inputs of 2 MiB and sums of them
    sluice.merge(paths, tmp_path / "out.pth", memory=memory)
    with pytest.raises(sluice.BudgetError):
        sluice.merge(paths, tmp_path / "stock.pth", method="model_stock", base=paths[0], memory=memory)


def refusals(tmp_path: Path, a: str, b: str) -> list[tuple[Any, dict[str, Any], type[Exception], str]]:
    """Return configurations of merges of two files, options, and the error of each with a part of its text."""
    torch.save(torch.zeros(1 << 18), tmp_path / "large.pth")
    flat = str(tmp_path / "flat.pth")
    torch.save({"w": torch.ones(2)}, flat)
    linear = {"merge_method": "linear", "models": [{"model": a}]}
    shared: list[Any] = []  # as aliases of YAML make it: its whole text would be long
    for _ in range(20):
        shared = [shared, shared]
    return [
        ({a: 1, b: 1}, {"method": "sce"}, sluice.UnsupportedError, "is not one of linear"),
        ({a: 1, b: 1}, {"method": "ties"}, sluice.FormatError, "needs a base_model"),
        ({a: 1, b: 1}, {"method": "slerp", "base": a}, sluice.FormatError, "no value of 't'"),
        ({a: 1, b: "much"}, {}, sluice.FormatError, "not a finite number"),
        ({a: 1, b: float("nan")}, {}, sluice.FormatError, "not a finite number"),
        ({}, {}, ValueError, "config is empty"),
        (str(tmp_path / "none.yml"), {}, sluice.MissingFileError, "none.yml"),
        (str(tmp_path), {}, sluice.SluiceError, "directory"),
        (str(tmp_path / "large.pth"), {}, sluice.FormatError, "Several checkpoints are a list"),
        ({a: 1}, {"method": "model_stock", "base": a}, sluice.FormatError, "takes 3 or more inputs, not 1"),
        ({**linear, "weights": 1}, {}, sluice.FormatError, "weights"),
        (linear, {"base": a}, ValueError, "a configuration has its own"),
        *(
            ({**linear, **each}, {}, sluice.UnsupportedError, "tokenizers are not merged")
            for each in ({"tokenizer_source": "union"}, {"chat_template": "auto"}, {"tokenizer": {"source": "union"}})
        ),
        ([a, str(tmp_path / "none.pth")], {}, FileNotFoundError, "none.pth"),
        ([a, a], {}, sluice.FormatError, r"twice an input.*Correct its inputs"),
        ({a: 1, b: 1, "c": 1}, {"method": "nuslerp"}, sluice.FormatError, "at most 2 inputs, not 3"),
        (sliced([{"model": a}], [{"model": b}]), {}, sluice.FormatError, "need a layer_range"),
        (sliced([{"model": a}, {"model": b, "layer_range": [0, 2]}]), {}, sluice.FormatError, "need a layer_range"),
        (sliced([{"model": a, "layer_range": [4, 2]}]), {}, sluice.FormatError, "layer_range is empty"),
        (sliced([{"model": n, "layer_range": [0, e]} for n, e in ((a, 1), (b, 2))]), {}, sluice.FormatError, "differ"),
        ({**sliced([{"model": a}]), "models": [{"model": b}]}, {}, sluice.FormatError, "one of models, slices"),
        ({"merge_method": "swa", "models": [{"model": a}], "dtype": "foo"}, {}, sluice.FormatError, "'foo'"),
        ({"merge_method": "swa", "models": [{"model": a}], "out_dtype": "int8"}, {}, sluice.FormatError, "'int8'"),
        (sliced([{"model": a, "layer_range": [0, 10**6]}]), {}, sluice.LimitError, "exceeds the limit 'entries'"),
        (sliced([{"model": flat, "layer_range": [0, 2]}]), {}, sluice.MismatchError, "have no layers"),
        ({a: 1}, {"parameters": {"densty": 0.1}}, sluice.FormatError, r"'densty'; expected .*weight\. Correct"),
        ({a: 1}, {"parameters": {"normalize": "false"}}, sluice.FormatError, "not true or false"),
        ({a: shared, b: 1}, {}, sluice.FormatError, r"found \[\[.*\[\.\.\.\].*Correct the configuration"),
        *(
            ({a: weight, b: 1}, {}, sluice.FormatError, "neither a number nor a list")
            for weight in ([0, "x"], [0, None], [{"filter": "q", "value": 1}, 0.5], {"filter": 3, "value": 1})
        ),
    ]


def test_what_is_refused(tmp_path: Path) -> None:
    found = states(2)
    a, b = written(tmp_path, found)
    out = tmp_path / "out.pth"
    for config, options, error, text in refusals(tmp_path, a, b):
        with pytest.raises(error, match=text):
            sluice.merge(config, out, **options)
    del found[1]["norm"]
    found[1]["model.embed.weight"] = torch.zeros(3, 5)
    safetensors.torch.save_file(found[1], b)
    with pytest.raises(sluice.MismatchError, match=r"norm is not in .*b.safetensors") as caught:
        sluice.merge({a: 1, b: 1}, out)
    assert "[12, 5]" in str(caught.value)
    assert not list(tmp_path.glob("*out*"))


def test_a_failure_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = states(2)
    paths = written(tmp_path, found)
    before = sorted(tmp_path.rglob("*"))
    for at in range(1, 50):
        with monkeypatch.context() as patch:
            injection = Injection(patch, failing(errno.EIO), at)
            try:
                sluice.merge(paths, tmp_path / "out.pth")
            except sluice.ReadError:
                assert sorted(tmp_path.rglob("*")) == before
                continue
        assert not injection.hits
        break
    assert at > 2


def test_integers_that_differ_are_the_last_ones_of_an_average_and_refused_before_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    networks = [nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.BatchNorm1d(3)) for _ in range(3)]
    networks[1].get_buffer("1.num_batches_tracked").fill_(7)
    paths = [str(tmp_path / name) for name in ("a.pth", "b.pth")]
    for network, path in zip(networks, paths, strict=False):
        torch.save(network.state_dict(), path)
    together = list[int]()
    watch(monkeypatch, _source, "_read", lambda _, pieces: together.append(len(pieces)))
    refused = r"1.num_batches_tracked.* different integers.* 'swa'"
    with unchanged(networks[2]), pytest.raises(sluice.MismatchError, match=refused):
        sluice.merge(dict.fromkeys(paths, 1), networks[2])
    assert together == [1]  # there may be many
    sluice.merge(paths, networks[2], method="swa")
    assert networks[2].get_buffer("1.num_batches_tracked") == 7
