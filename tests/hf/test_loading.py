"""Models of transformers in place of ``from_pretrained``."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import sluice
from support import fresh_process
from support.hf_architectures import case_named
from support.hf_comparing import assert_same, edit_config


def _saved(transformers: Any, path: Path, name: str = "GPT2LMHeadModel") -> Any:
    model = case_named(name).model(transformers)
    model.save_pretrained(path)
    return model


@pytest.fixture
def gpt2(transformers: Any, tmp_path: Path) -> Any:
    """Return a model that is saved in the folder."""
    return _saved(transformers, tmp_path)


def _edit_weights(path: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
    file = path / "model.safetensors"
    state = load_file(file)
    edit(state)
    save_file({name: tensor.clone() for name, tensor in state.items()}, file)


@pytest.mark.usefixtures("fresh_processes")
def test_importing_it_imports_no_transformers() -> None:
    code = "import sys, sluice; sluice.hf.from_pretrained; assert 'transformers' not in sys.modules"
    done = fresh_process.run(code)
    assert done.returncode == 0, done.stderr


# Classes and dtypes


def test_the_class_can_be_given(transformers: Any, gpt2: Any, tmp_path: Path) -> None:
    with pytest.raises(sluice.UnsupportedError, match=r"AutoModelForCTC .* has none for GPT2Config"):
        sluice.hf.from_pretrained(tmp_path, transformers.AutoModelForCTC)
    for given in (None, transformers.GPT2LMHeadModel, transformers.AutoModelForCausalLM):
        assert type(sluice.hf.from_pretrained(tmp_path, given)) is transformers.GPT2LMHeadModel
    edit_config(tmp_path, architectures=5)
    sluice.hf.from_pretrained(tmp_path, transformers.AutoModelForCausalLM)
    for wrong in (5, "GPT2LMHeadModel"):
        with pytest.raises(TypeError, match=f"model_class is an? {type(wrong).__name__}; write a class"):
            sluice.hf.from_pretrained(tmp_path, wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("edited", [False, True], ids=["of the configuration", "of the weights"])
def test_dtype_auto(transformers: Any, tmp_path: Path, edited: bool) -> None:
    model = case_named("LlamaForCausalLM").model(transformers).to(torch.bfloat16)
    model.model.norm.float()  # the first in the file, but not by name
    model.lm_head.to(torch.float8_e4m3fn)  # the first by name, but of no dtype for a model
    model.save_pretrained(tmp_path)
    if edited:
        edit_config(tmp_path, dtype=None)
    loaded = sluice.hf.from_pretrained(tmp_path)
    assert loaded.dtype is torch.bfloat16
    assert_same(loaded, type(model).from_pretrained(tmp_path))


@pytest.mark.parametrize("dtype", [torch.int8, "int8", "nonsense", torch.float8_e5m2])
def test_other_dtypes_are_refused(gpt2: Any, tmp_path: Path, dtype: Any) -> None:
    with pytest.raises(ValueError, match="floating-point dtype"):
        sluice.hf.from_pretrained(tmp_path, dtype=dtype)


def test_modules_that_the_library_keeps_in_float32(transformers: Any, tmp_path: Path) -> None:
    model = _saved(transformers, tmp_path, "T5ForConditionalGeneration")
    loaded = sluice.hf.from_pretrained(tmp_path, dtype=torch.float16)
    kept = {name for name, tensor in loaded.named_parameters() if tensor.dtype is torch.float32}
    assert kept
    assert all(".wo." in name for name in kept)
    assert_same(loaded, type(model).from_pretrained(tmp_path, dtype=torch.float16))


def test_implementations_and_configurations_are_passed_on(transformers: Any, gpt2: Any, tmp_path: Path) -> None:
    config = transformers.AutoConfig.from_pretrained(tmp_path, attn_pdrop=0.5)
    loaded = sluice.hf.from_pretrained(tmp_path, config=config, attn_implementation="eager")
    assert loaded.config._attn_implementation == "eager"
    assert loaded.config.attn_pdrop == 0.5
    assert loaded.config is not config
    with pytest.raises(TypeError, match="config is a dict"):
        sluice.hf.from_pretrained(tmp_path, config={})


def test_the_report_is_handed_over(gpt2: Any, tmp_path: Path) -> None:
    reports: list[sluice.LoadReport] = []
    loaded = sluice.hf.from_pretrained(tmp_path, report=reports.append)
    [report] = reports
    assert report.final_bytes == sum(tensor.nbytes for tensor in loaded.parameters())
    assert report.tied == (("transformer.wte.weight", "lm_head.weight"),)
    assert (report.missing, report.unexpected, report.key) == ((), (), None)
    assert "transformer.wte.weight" in str(report.table())


def test_what_was_loaded_is_saved_as_it_was(transformers: Any, tmp_path: Path) -> None:
    _saved(transformers, tmp_path / "a", "MixtralForCausalLM")
    sluice.hf.from_pretrained(tmp_path / "a").save_pretrained(tmp_path / "b")
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in "ab")
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


# Missing and unexpected names


def test_a_missing_head_is_named_or_initialised_by_the_library(transformers: Any, tmp_path: Path) -> None:
    case_named("BertModel").model(transformers).save_pretrained(tmp_path)
    wanted = transformers.BertForSequenceClassification
    with pytest.raises(sluice.MismatchError, match=r"classifier\.weight") as caught:
        sluice.hf.from_pretrained(tmp_path, wanted)
    assert caught.value.missing == ("classifier.bias", "classifier.weight")
    torch.manual_seed(3)
    theirs = wanted.from_pretrained(tmp_path)
    torch.manual_seed(3)
    reports: list[sluice.LoadReport] = []
    ours = sluice.hf.from_pretrained(tmp_path, wanted, strict=False, report=reports.append)
    assert_same(ours, theirs)
    assert reports[0].initialised == ("classifier.bias", "classifier.weight")


def test_a_checkpoint_without_any_weight_of_the_model(gpt2: Any, tmp_path: Path) -> None:

    def keep_none(state: dict[str, torch.Tensor]) -> None:
        state.clear()
        state["x"] = torch.ones(1)

    _edit_weights(tmp_path, keep_none)
    with pytest.raises(sluice.MismatchError, match=r"it has 0 of \d+ tensors(.|\n)*--allow-empty"):
        sluice.hf.from_pretrained(tmp_path, strict=False)
    reports: list[sluice.LoadReport] = []
    sluice.hf.from_pretrained(tmp_path, strict=False, allow_empty=True, report=reports.append)
    assert str(reports[0]).startswith("loaded 0 of ")


def test_a_body_out_of_a_checkpoint_with_a_head(transformers: Any, tmp_path: Path) -> None:
    _saved(transformers, tmp_path, "RobertaForSequenceClassification")
    with pytest.raises(sluice.MismatchError, match=r"'classifier\.dense\.weight' is unexpected: RobertaModel has no"):
        sluice.hf.from_pretrained(tmp_path, transformers.RobertaModel)
    reports: list[sluice.LoadReport] = []
    ours = sluice.hf.from_pretrained(tmp_path, transformers.RobertaModel, strict=False, report=reports.append)
    assert "classifier.dense.weight" in reports[0].unexpected
    theirs = transformers.RobertaModel.from_pretrained(tmp_path)
    ours.pooler = theirs.pooler  # random in both
    assert_same(ours, theirs)


def test_names_that_the_library_ignores_are_not_reported(transformers: Any, tmp_path: Path) -> None:
    _saved(transformers, tmp_path, "LlamaForCausalLM")
    _edit_weights(
        tmp_path, lambda state: state.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)})
    )
    sluice.hf.from_pretrained(tmp_path)


@pytest.mark.parametrize("equal", [True, False])
def test_tied_weights_that_the_checkpoint_has_twice(gpt2: Any, tmp_path: Path, equal: bool) -> None:
    _edit_weights(
        tmp_path, lambda state: state.update({"lm_head.weight": state["transformer.wte.weight"] + (not equal)})
    )
    reports: list[sluice.LoadReport] = []
    ours = sluice.hf.from_pretrained(tmp_path, report=reports.append)
    assert (ours.lm_head.weight is ours.transformer.wte.weight) is equal
    assert any("were not tied" in note for note in reports[0].notes) is not equal
    assert_same(ours, type(gpt2).from_pretrained(tmp_path))


@pytest.mark.parametrize("kept", ["model.encoder.embed_tokens.weight", "lm_head.weight"])
def test_a_tie_is_found_by_any_of_its_names(transformers: Any, tmp_path: Path, kept: str) -> None:
    model = _saved(transformers, tmp_path, "BartForConditionalGeneration")

    def only_one_name(state: dict[str, torch.Tensor]) -> None:
        state[kept] = state.pop("model.shared.weight")
        state["model.decoder.embed_tokens.weight"] = state[kept]

    _edit_weights(tmp_path, only_one_name)
    assert_same(sluice.hf.from_pretrained(tmp_path), type(model).from_pretrained(tmp_path))


# Refusals


def test_code_of_the_directory_is_never_imported(transformers: Any, gpt2: Any, tmp_path: Path) -> None:
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')", encoding="utf-8")
    auto_map = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    edit_config(tmp_path, auto_map=auto_map)
    assert type(sluice.hf.from_pretrained(tmp_path)) is transformers.GPT2LMHeadModel
    edit_config(tmp_path, model_type="evil", architectures=["Model"])
    with pytest.raises(sluice.UnsupportedError):
        sluice.hf.from_pretrained(tmp_path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"architectures": ["AutoModel"]}, "no model class with this name"),
        ({"architectures": ["os.system"]}, "no model class with this name"),
        ({"architectures": ["NoSuchModel"]}, "no model class with this name"),
        ({"architectures": []}, "not name exactly one architecture"),
        ({"architectures": ["GPT2Model", "GPT2LMHeadModel"]}, "not name exactly one architecture"),
        ({"architectures": {"GPT2LMHeadModel": 1}}, "not name exactly one architecture"),
        ({"architectures": [None]}, "not name exactly one architecture"),
        ({"n_layer": -1}, None),
        ({"n_head": 5}, None),
        ({"n_embd": "wide"}, None),
        ({"vocab_size": [1, 2]}, None),
        ({"activation_function": "os.system"}, None),
        ({"dtype": "load"}, None),
        ({"dtype": "int8"}, None),
        ({"dtype": "float8_e4m3fn"}, None),
        ({"attn_implementation": "someone/kernel"}, None),
    ],
)
def test_configurations_that_make_no_sense(
    gpt2: Any, tmp_path: Path, values: dict[str, Any], message: str | None
) -> None:
    edit_config(tmp_path, **values)
    with pytest.raises((sluice.UnsupportedError, sluice.MismatchError), match=message):
        sluice.hf.from_pretrained(tmp_path)


@pytest.mark.parametrize("settings", ["[]", '{"max_new_tokens": -1}', '{"watermarking_config": 5}'])
def test_settings_for_generation_are_read_before_weights(gpt2: Any, tmp_path: Path, settings: str) -> None:
    (tmp_path / "generation_config.json").write_text(settings, encoding="utf-8")
    _edit_weights(tmp_path, lambda state: state.update(x=torch.ones(1)))  # would be unexpected
    with pytest.raises(sluice.UnsupportedError, match=r"cannot read generation_config\.json"):
        sluice.hf.from_pretrained(tmp_path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this platform has no FIFOs")
def test_the_configuration_is_a_file_and_bounded(transformers: Any, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(sluice.ReadError):
        sluice.hf.from_pretrained(tmp_path)
    _saved(transformers, tmp_path / "model")
    with pytest.raises(sluice.LimitError):
        sluice.hf.from_pretrained(tmp_path / "model", limits=sluice.Limits(header_bytes=100))


@pytest.mark.parametrize(
    ("name", "text", "kind"),
    [
        ("config.json", "{", sluice.FormatError),
        ("config.json", "[1]", sluice.FormatError),
        ("config.json", '{"model_type": 7}', sluice.UnsupportedError),
        ("config.json", '{"model_type": "no-such-model"}', sluice.UnsupportedError),
        ("adapter_config.json", "{}", sluice.UnsupportedError),
        ("other.json", "{}", sluice.MissingFileError),
    ],
)
def test_directories_that_hold_no_model(
    transformers: Any, tmp_path: Path, name: str, text: str, kind: type[Exception]
) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(kind):
        sluice.hf.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("directory", "kind", "message"),
    [
        ("./no-such-organization/model", FileNotFoundError, r"the directory does not exist\."),
        ("https://huggingface.co/gpt2", sluice.UnsupportedError, r"a local path is .*snapshot_download\('gpt2'\)"),
        (__file__, sluice.ReadError, r"not a local directory with a config\.json\. .*load_into loads"),
    ],
)
def test_what_is_no_directory(transformers: Any, directory: str, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        sluice.hf.from_pretrained(directory)


def test_a_conversion_that_computes_is_refused_by_name(
    transformers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import conversion_mapping
    from transformers import core_model_loading as loading

    class Negate(loading.ConversionOps):  # type: ignore[misc]  # transformers has no types
        def convert(self, input_dict: Any, *, target_patterns: Any, **_: Any) -> Any:
            return {target_patterns[0]: -next(iter(input_dict.values()))[0]}

    converter = loading.WeightConverter("wte.weight", "wte.weight", operations=[Negate()])
    _saved(transformers, tmp_path)
    monkeypatch.setattr(conversion_mapping, "get_model_conversion_mapping", lambda _: [converter])
    with pytest.raises(sluice.UnsupportedError, match=r"GPT2LMHeadModel .*\(Negate\).*torch\.neg") as caught:
        sluice.hf.from_pretrained(tmp_path)
    assert caught.value.tensor == "transformer.wte.weight"


def test_without_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"pip install 'sluice\[hf\]'"):
        sluice.hf.from_pretrained(tmp_path)


@pytest.mark.parametrize("accepted", [((4, 0), (5, 0)), ((99, 0), (100, 0))])
def test_with_transformers_that_were_not_checked(
    transformers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, accepted: Any
) -> None:
    monkeypatch.setattr(sluice.hf._hub, "VERSIONS", accepted)
    with pytest.raises(ImportError, match=r"does not support transformers .*pip install 'sluice\[hf\]'"):
        sluice.hf.from_pretrained(tmp_path)


def test_a_head_for_other_classes_is_initialized_as_the_library_does(transformers: Any, tmp_path: Path) -> None:
    config = transformers.GPT2Config(vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=2, num_labels=5)
    transformers.GPT2ForSequenceClassification(config).save_pretrained(tmp_path)
    config.num_labels = 3
    with pytest.raises(sluice.MismatchError, match="ignore_mismatched=True"):
        sluice.hf.from_pretrained(tmp_path, config=config)
    reports: list[sluice.LoadReport] = []
    torch.manual_seed(0)
    ours = sluice.hf.from_pretrained(tmp_path, config=config, ignore_mismatched=True, report=reports.append)
    torch.manual_seed(0)
    theirs = transformers.GPT2ForSequenceClassification.from_pretrained(
        tmp_path, config=config, ignore_mismatched_sizes=True
    )
    assert_same(ours, theirs)
    assert reports[0].mismatched == {"score.weight": ((3, 8), (5, 8))}
    assert not reports[0].missing


@pytest.mark.gpu
def test_a_model_computes_as_on_the_cpu(tmp_path: Path, gpt2: Any, device: str) -> None:
    model = sluice.hf.from_pretrained(tmp_path, device=device)
    tokens = torch.randint(0, 96, (2, 9))
    with torch.no_grad():
        ours, theirs = model(tokens.to(device)).logits, gpt2(tokens).logits
    torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-2, atol=1e-2)
    assert model.lm_head.weight is model.transformer.wte.weight
