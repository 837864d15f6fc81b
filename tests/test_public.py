"""Unknown argument names get an error that says what to write; signatures stay exact."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import sluice
from sluice._public import _HINTS, explain_keywords

#: The package, for calls that a type checker refuses.
untyped: Any = sluice

VERBS: list[Callable[..., Any]] = [
    sluice.convert, sluice.diff, sluice.load_into, sluice.load_optimizer, sluice.load_state_dict, sluice.open,
    sluice.plan, sluice.save, sluice.verify, sluice.hf.from_pretrained, sluice.LazyTensor.read,
]  # fmt: skip


def test_what_is_public_is_found_where_it_says_so() -> None:
    # ``pickle`` looks for the class of an object there.
    marks = re.compile(r"^ *@public\((?:\"(.+)\")?\)\n(?: *@.*\n)*(?:class|def) (\w+)", re.MULTILINE)
    sources = [path.read_text(encoding="utf-8") for path in Path(sluice.__file__).parent.rglob("*.py")]
    marked = [match for source in sources for match in marks.findall(source)]
    assert len(marked) > len(VERBS)
    assert [match for match in marked if not hasattr(importlib.import_module(match[0] or "sluice"), match[1])] == []


@pytest.mark.parametrize("name", ["hf", "integrations", "measuring", "rules", "safetensors", "testing", "torch"])
def test_public_packages_are_attributes(name: str) -> None:
    assert untyped.__getattr__(name) is importlib.import_module(f"sluice.{name}")


@pytest.mark.parametrize("verb", VERBS)
def test_signatures_are_explicit(verb: Callable[..., Any]) -> None:
    kinds = {parameter.kind for parameter in inspect.signature(verb).parameters.values()}
    assert not kinds & {inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL}
    with pytest.raises(TypeError, match=f"{verb.__name__}\\(\\) has no argument 'zzzz': its arguments are "):
        verb(zzzz=1)


@pytest.mark.parametrize(
    ("verb", "name", "message"),
    [
        (sluice.load_into, "map_location", "use device="),
        (sluice.hf.from_pretrained, "device_mesh", "use distributed_config="),
        (sluice.load_into, "weights_only", "leave it out: sluice never runs code"),
        (sluice.load_into, "mmap", "place='map'"),
        (sluice.load_into, "assign", "leave it out"),
        (sluice.load_state_dict, "f", "use source="),
        (sluice.save, "f", "use path="),
        (sluice.save, "state_dict", "use obj="),
        (sluice.load_into, "torch_dtype", "use dtype="),
        (sluice.load_into, "device_map", "use device="),
        (sluice.load_into, "quantization_config", "quantize=Int8WeightOnlyConfig"),
        (sluice.stream, "quantize", r"load_into\(quantize=\) quantizes"),
        (sluice.hf.from_pretrained, "load_in_8bit", "use quantization_config="),
        (sluice.load_into, "max_memory", r"MemoryLimits\(host"),
        (sluice.load_state_dict, "strict", "only load_into and plan"),
        (sluice.load_state_dict, "mmap", "its arguments are source"),  # it has no place=
        (sluice.load_state_dict, "rename", r"rules=\[sluice\.rules\.rename\('old\.\*\*', 'new\.\*\*'\)\]$"),
        (sluice.open, "rename", "its arguments are source"),  # it has no rules=
        (sluice.diff, "key_a", "use key=$"),
        (sluice.diff, "key_b", "use other_key=$"),
        (sluice.open, "mode", "opened for reading"),
        (sluice.convert, "exist_ok", "use overwrite="),
        (sluice.hf.from_pretrained, "token", "HF_TOKEN"),
        (sluice.load_into, "revision", "write it in the source, as in 'hf://owner/name@revision'"),
        (sluice.load_into, "token", "'hf://owner/name' uses the settings of huggingface_hub: HF_TOKEN"),
        (sluice.open, "cache_dir", "HF_HUB_CACHE"),
        (sluice.open, "headers", r"use source=sluice\.Remote\(url, headers="),
        (sluice.load_into, "ignore_mismatched_sizes", "use ignore_mismatched="),
        (sluice.load_into, "stric", r"did you mean strict=\?"),
    ],
)
def test_the_error_names_the_argument_to_write(verb: Callable[..., Any], name: str, message: str) -> None:
    with pytest.raises(TypeError, match=rf"{verb.__name__}\(\) has no argument '{name}': .*{message}"):
        verb("x", **{name: 1})


def test_every_hint_leads_to_an_argument_or_says_to_leave_it_out() -> None:
    known = {name for verb in VERBS for name in inspect.signature(verb).parameters}
    for name, text in _HINTS.items():
        arguments = re.findall(r"(?:^| )([a-z_]+)=", text.partition("(")[0])
        assert text.startswith("leave it out: ") or (arguments and set(arguments) <= known), name


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: untyped.load_state_dict("f", "cpu"),
            "no further positional arguments; write their names: device",
        ),
        (lambda: untyped.open("f", "rb"), "takes no further positional arguments"),
        (lambda: untyped.plan("f"), r"source is missing; plan\(None, source\) plans for the checkpoint alone"),
        (untyped.load_into, r"load_into\(model, source\): model and source are missing$"),
        (lambda: untyped.diff("a"), r"diff\(a, b\): b is missing$"),
    ],
)
def test_positional_arguments(call: Callable[[], object], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        call()


def test_an_error_inside_of_the_function_is_unchanged() -> None:
    @explain_keywords
    def function(a: int, b: int = 2, *, c: int = 3) -> int:
        return a + b + c + int("x" if c == 0 else 0)

    assert function(1) == 6
    assert function(b=1, a=1, c=1) == 3
    with pytest.raises(ValueError, match="invalid literal"):
        function(1, c=0)


@pytest.mark.parametrize("name", ["load", "load_file", "load_model", "safe_open", "save_file", "from_pretrained"])
def test_functions_of_other_libraries_lead_to_those_of_sluice(name: str) -> None:
    with pytest.raises(AttributeError, match=rf"no attribute '{name}'; sluice\.[a-z_.]+\("):
        getattr(sluice, name)
