"""Parameters that are not in memory, and modules with them.

After every end of every verb a module answers right, or refuses by name: never with numbers of other weights.
"""

from __future__ import annotations

import copy
import errno
import pickle
import sys
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import safetensors.torch
import torch
from torch import nn

import sluice
from sluice._errors import PartialLoadError, SluiceError, StreamError
from sluice.modules.unloaded import Guard, ParkedParameter
from support.hf_architectures import CASES
from support.module_zoo import ZOO, sample, trained
from support.system_calls import Injection, failing
from support.trained_net import load
from support.watching import raising

Build = Callable[[], nn.Module]
Call = Callable[[nn.Module], list[torch.Tensor]]

_ARCHITECTURES = [
    *("T5ForConditionalGeneration", "ViTForImageClassification", "ConvNextForImageClassification"),
    *("WhisperForConditionalGeneration", "GPT2LMHeadModel", "MixtralForCausalLM"),
]


@pytest.fixture(autouse=True)
def _small_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sluice._defaults.STREAMED_BYTES", 1)
    monkeypatch.setattr("sluice._defaults.RECYCLED_STEP_BYTES", 64)


def _streamed(model: nn.Module, file: Path, inside: Callable[[], object]) -> None:
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    for share in (0.6, 0.9, 2):
        try:
            stream = sluice.stream(model, file, memory=int(nbytes * share) + 64)
        except sluice.BudgetError:
            continue
        with stream:
            inside()
        return


def _raise(error: type[BaseException]) -> mock.Mock:
    return mock.Mock(side_effect=error)


def _unreadable(load: Callable[[], object]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        Injection(patch, failing(errno.EIO), 0)
        load()


def _quantize(root: nn.Module) -> None:
    for parameter in root.parameters():
        if not parameter.is_meta:
            raise RuntimeError("no memory")


def _optimizer(model: nn.Module, file: Path) -> None:
    sluice.load_into(model, file)
    optimizer = torch.optim.AdamW(parameter for parameter in model.parameters() if parameter.is_floating_point())
    sluice.load_optimizer(optimizer, file)


#: Ways to end, with or without an error. Arguments: a model on the meta device, the file of its weights, and a call.
_ENDS: dict[str, Callable[[nn.Module, Path, Callable[[], object]], object]] = {
    "stream closed": _streamed,
    "exception in a stream": lambda model, file, _: _streamed(model, file, _raise(ValueError)),
    "interrupt in a stream": lambda model, file, _: _streamed(model, file, _raise(KeyboardInterrupt)),
    "load failed": lambda model, file, _: _unreadable(lambda: sluice.load_into(model, file)),
    "load stopped": lambda model, file, _: sluice.load_into(model, file, progress=_raise(KeyboardInterrupt)),
    "quantizing failed": lambda model, file, _: sluice.load_into(model, file, quantize=_quantize),
    "optimizer failed": lambda model, file, _: _optimizer(model, file),
}


def _check(build: Build, model: nn.Module, call: Call, file: Path, end: str, want: list[torch.Tensor]) -> None:
    torch.save(model.state_dict(), file)
    with sluice.empty_init():
        empty = build().eval()
    with torch.no_grad():
        with suppress(SluiceError, ValueError, RuntimeError, KeyboardInterrupt):
            _ENDS[end](empty, file, lambda: call(empty))
        try:
            found = call(empty)
        except StreamError as error:
            assert error.tensor is not None
        else:
            assert _equal(found, want)
        sluice.load_into(empty, file)
        assert _equal(call(empty), want)


def _equal(found: Any, want: list[torch.Tensor]) -> bool:
    return isinstance(found, list) and len(found) == len(want) and all(map(torch.equal, found, want))


@pytest.mark.parametrize("end", _ENDS)
@pytest.mark.parametrize("name", sorted(ZOO.keys() - {"lazy", "orthogonal"}))
def test_modules_of_torch_and_of_users(name: str, end: str, tmp_path: Path) -> None:
    model, x = trained(name).eval(), sample(name)

    def call(module: nn.Module) -> list[torch.Tensor]:
        found = module(x)
        return [found] if isinstance(found, torch.Tensor) else [found[0]]

    with torch.no_grad():
        want = call(model)
    _check(ZOO[name][0], model, call, tmp_path / "f.pth", end, want)


@pytest.mark.parametrize("end", _ENDS)
@pytest.mark.parametrize("name", _ARCHITECTURES)
def test_models_of_transformers(name: str, end: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    case = next(case for case in CASES if case.name == name)
    model, inputs = case.model(transformers), case.inputs()
    build = lambda: getattr(transformers, name)(case.config(transformers))  # noqa: E731
    call = lambda module: _outputs(module, inputs)  # noqa: E731
    _check(build, model, call, tmp_path / "f.pth", end, _outputs(model, inputs))


def _outputs(module: nn.Module, inputs: Any) -> list[torch.Tensor]:
    torch.manual_seed(0)
    with torch.no_grad():
        return [found for found in module(**inputs).values() if isinstance(found, torch.Tensor)]


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
@pytest.mark.parametrize("late", [False, True])
def test_live_modules_are_refused_after_a_load_that_changed_a_part(error: type[BaseException], *, late: bool) -> None:
    def make() -> nn.Sequential:
        return nn.Sequential(*(nn.Linear(512, 512) for _ in range(6)))

    saved, model, x = make(), make(), torch.randn(2, 512)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model._load_state_dict_post_hooks[-1] = mock.Mock(side_effect=error if late else None)
    with pytest.raises((PartialLoadError, error)):
        load(model, saved.state_dict(), progress=not late and raising(3, error()))
    del model._load_state_dict_post_hooks[-1]
    for part in (model, model[0]):
        with pytest.raises(StreamError, match="not in memory"):
            part(x)
    lent = torch.func.functional_call(model, saved.state_dict(), (x,))
    assert torch.equal(lent, saved(x))
    if error is KeyboardInterrupt:
        load(model, saved.state_dict())
        assert torch.equal(model(x), saved(x))
        assert not model._forward_pre_hooks
    else:
        model.load_state_dict(before)  # also restored without sluice
        fresh = make()
        fresh.load_state_dict(before)
        assert torch.equal(model(x), fresh(x))


def _layers() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(512, 512) for _ in range(2)))


def _lazy() -> nn.Sequential:
    return nn.Sequential(nn.Linear(512, 512), nn.LazyLinear(512))


_SCRIPT = pytest.mark.filterwarnings("ignore:`torch.jit.script` is")  # deprecated, or not supported on this Python


def _torn(model: nn.Module, source: nn.Module) -> None:
    with pytest.raises(PartialLoadError):
        load(model, source.state_dict(), progress=_raise(ZeroDivisionError))


#: Modules that are loaded, and what calls them. The second is made before the load, the third afterwards.
_CALLS: dict[str, tuple[Build, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "lazy": (_lazy, lambda model: model, lambda model: model[0]),
    "script": (lambda: torch.jit.script(_layers()), lambda model: model, lambda model: model),
    "parts of a script": (lambda: nn.Sequential(*torch.jit.script(_layers()).children()), lambda m: m, lambda m: m[1]),
    "compiled": (_layers, lambda model: torch.compile(model, backend="eager"), lambda compiled: compiled),
    "compile()": (_layers, lambda model: [model.compile(backend="eager"), model][1], lambda model: model),
    "copy": (_layers, lambda model: model, copy.deepcopy),
    "copy of a part": (_layers, lambda model: model, lambda model: copy.deepcopy(model[1])),
}


@_SCRIPT
@pytest.mark.parametrize("how", _CALLS)
def test_every_way_to_call_a_module_that_was_loaded_in_part_is_refused(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "peft", sys)  # if it is imported, its wrappers are looked for
    (build, before, after), x = _CALLS[how], torch.ones(2, 512)
    source, model = build(), build()
    want, called = source(x), before(model)
    if how != "lazy":  # it has its memory from the load
        called(x)
    _torn(model, source)
    refused = after(called)
    with pytest.raises(StreamError, match="not in memory"):
        refused(x)
    load(model, source.state_dict())
    assert torch.equal(called(x), want)


def test_gradients_of_earlier_calls_are_refused_after_a_load_that_changed_a_part() -> None:
    model = _layers()
    loss = model(torch.ones(2, 512)).sum()
    _torn(model, _layers())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@_SCRIPT
def test_restored_modules_are_ordinary_ones() -> None:
    source, x = _layers(), torch.ones(2, 512)
    outer = nn.Sequential(_layers())
    _torn(outer[0], source)
    load(outer, nn.Sequential(source).state_dict(), dtype="fp64")
    assert torch.equal(outer(x.double()), copy.deepcopy(source).double()(x.double()))

    with sluice.empty_init():
        model, hooked = _layers(), _layers()
    for empty in (model, hooked):
        with pytest.raises(sluice.MismatchError):
            load(empty, {})
    hooked.register_load_state_dict_post_hook(lambda *_: None)  # type: ignore[no-untyped-call]
    for empty in (model, hooked):
        empty.load_state_dict(source.state_dict(), assign=True)
        assert torch.equal(empty(x), source(x))
    assert b"sluice" not in pickle.dumps(model)
    for each in (model, hooked):
        torch.jit.script(each)


def test_weights_of_inference_mode_can_be_restored_and_a_part_has_no_others() -> None:
    source, x = _layers(), torch.ones(2, 512)
    with torch.inference_mode():
        model = _layers()
        _torn(model, source)
        assert len(pickle.dumps(model[0])) < 1.5 * 512 * 512 * 4
        model[0].load_state_dict(source[0].state_dict())
        with pytest.raises(StreamError, match="not in memory"):
            model(x)
        model.load_state_dict(source.state_dict())
        assert torch.equal(model(x), source(x))


def test_the_state_of_an_optimizer_does_not_touch_its_model(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    torch.save({"other": torch.ones(2)}, tmp_path / "f.pth")
    want = model(torch.ones(4))
    with pytest.raises(SluiceError):
        sluice.load_optimizer(optimizer, tmp_path / "f.pth")
    assert torch.equal(model(torch.ones(4)), want)


def _parked() -> ParkedParameter:
    return ParkedParameter.of(nn.Parameter(torch.empty(3, 2, dtype=torch.bfloat16, device="meta")), "a.weight", "cpu")


def test_it_answers_what_it_is() -> None:
    parked = _parked()
    assert isinstance(parked, nn.Parameter)
    assert (parked.shape, parked.dtype, parked.device) == ((3, 2), torch.bfloat16, torch.device("cpu"))
    assert (parked.numel(), parked.element_size(), parked.nbytes, parked.requires_grad) == (6, 2, 12, True)
    assert parked.is_floating_point()
    assert not parked.is_meta
    assert "a.weight" in repr(parked)
    assert hash(parked) == hash(parked)


def test_operations_borrow_the_weights() -> None:
    parked, weights = _parked(), torch.ones(3, 2, dtype=torch.bfloat16)
    parked.lend = lambda: nullcontext(weights)
    assert torch.equal(torch.stack([parked, parked])[1] + parked, 2 * weights)
    assert parked[1:].shape == (2, 2)
    assert torch.equal(parked.detach() + 0, weights)
    assert isinstance(parked.detach(), ParkedParameter)  # as in state dicts


@pytest.mark.parametrize(
    "change",
    [
        lambda parked: parked.detach_(),
        lambda parked: parked.__setitem__(0, 1),
        lambda parked: parked.__iadd__(1),
        lambda parked: setattr(parked, "data", torch.ones(3, 2)),
        lambda parked: torch.add(1, 1, out=parked),
        lambda parked: torch.max(torch.ones(3, 2), 0, out=(torch.ones(2), parked)),
        nn.init.zeros_,
        lambda parked: nn.init.zeros_(tensor=parked),
        lambda parked: torch._foreach_add_([torch.ones(3, 2), parked], 1),
    ],
)
def test_it_cannot_be_changed(change: object) -> None:
    parked = _parked()
    with pytest.raises(StreamError, match="change its weights"):
        change(parked)  # type: ignore[operator]


def test_operations_change_other_tensors_by_its_weights() -> None:
    parked, weights = _parked(), torch.ones(3, 2, dtype=torch.bfloat16)
    parked.lend = lambda: nullcontext(weights)
    x = torch.zeros(3, 2, dtype=torch.bfloat16)
    x += parked
    x[1:] = parked[1:] + torch.add(x, parked, out=torch.empty_like(x))[1:]
    x.mul_(parked).copy_(x + parked, non_blocking=True)
    assert torch.equal(x, weights * torch.tensor([[2], [4], [4]]))


def test_it_is_neither_copied_nor_pickled_nor_used_later() -> None:
    parked = _parked()
    for use in (copy.deepcopy, pickle.dumps, torch.Tensor.sum):
        with pytest.raises(StreamError, match=r"a\.weight"):
            use(parked)


def test_a_guarded_module_refuses_what_needs_all_weights_and_keeps_the_rest() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    original = model[1].weight
    model[1].weight = ParkedParameter.of(nn.Parameter(torch.empty(2, 2, device="meta")), "1.weight", "cpu")
    guard = Guard(model)
    for refused in (
        model.half,
        lambda: model.load_state_dict({"1.weight": torch.ones(2, 2)}),
        lambda: pickle.dumps(model.state_dict()),
        lambda: copy.deepcopy(model[1].state_dict()),
        lambda: safetensors.torch.save(model.state_dict()),
        lambda: model.to("meta"),
        lambda: copy.deepcopy(model),
        lambda: pickle.dumps(model),
    ):
        with pytest.raises(StreamError):
            refused()
    assert model.to("cpu", torch.float32) is model  # as training loops do
    model.load_state_dict({"0.bias": torch.ones(2)}, strict=False)  # weights that are in memory
    assert model[0].weight.dtype == torch.float32
    assert model[0].double().weight.dtype == torch.float64  # its weights are in memory
    guard.remove()
    model[1].weight = original
    assert copy.deepcopy(model).half().state_dict()["1.weight"].dtype == torch.float16
