"""Modules: what is found in them, and what they are after finished tensors were installed. Oracle: load_state_dict."""

from __future__ import annotations

import copy
import importlib
import io
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.nn.utils import parametrizations, prune

from sluice._empty_init import empty_init
from sluice._errors import MismatchError
from sluice._initial_values import initial_values
from sluice._load_hooks import follow_loading
from sluice._matching import match
from sluice._modules import collect
from sluice._swap import swap_data
from state_dicts import hold, load, memory_for

OLD_WEIGHT_NORM = "ignore:.*weight_norm. is deprecated:FutureWarning"


@pytest.fixture(scope="module", autouse=True)
def _imported_compiler() -> None:
    """Let torch make its cache directory before a test starts: some meta kernels import its compiler."""
    importlib.import_module("torch._inductor.runtime.cache_dir_utils").cache_dir()


class Attention(nn.Module):
    """A causal mask that is saved and rotary frequencies that are not."""

    mask: torch.Tensor
    frequencies: torch.Tensor

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.query = nn.Linear(width, width)
        self.register_buffer("mask", torch.triu(torch.ones(4, 4, dtype=torch.bool), diagonal=1))
        self.register_buffer("frequencies", 1.0 / torch.arange(1, width + 1), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.query(x) @ (x * self.frequencies).mT
        result: torch.Tensor = scores.masked_fill(self.mask, -1e9).softmax(-1) @ x
        return result


class Net(nn.Module):
    """Ties, a shared block, norms, buffers of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.first = Attention()
        self.again = self.first
        self.layers = nn.ModuleList([Attention(), nn.LayerNorm(6)])
        self.norm = nn.BatchNorm1d(4)
        self.scale = nn.Parameter(torch.tensor(2.0), requires_grad=False)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.again(self.first(self.embedding(tokens)))
        for layer in self.layers:
            x = layer(x)
        result: torch.Tensor = self.head(self.norm(x) * self.scale)
        return result


TOKENS = torch.arange(8).reshape(2, 4)


def trained() -> Net:
    torch.manual_seed(0)
    net = Net()
    net(TOKENS)
    return net.eval()


def empty(build: Callable[[], nn.Module] = Net) -> Any:
    with empty_init():
        return build()


def assert_equal(one: nn.Module, other: nn.Module) -> None:
    ours, theirs = one.state_dict(), other.state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert (ours[name].dtype, ours[name].stride()) == (tensor.dtype, tensor.stride()), name
        assert torch.equal(ours[name], tensor), name


def problem(module: nn.Module, state_dict: Mapping[str, torch.Tensor], **options: Any) -> str:
    before = {name: (id(t), t.is_meta or t._version) for name, t in module.state_dict(keep_vars=True).items()}
    with pytest.raises(MismatchError) as caught:
        load(module, state_dict, **options)
    after = {name: (id(t), t.is_meta or t._version) for name, t in module.state_dict(keep_vars=True).items()}
    assert after == before
    return str(caught.value)


# What is found


def test_collect_describes_each_tensor_once_with_all_its_names() -> None:
    state = collect(Net())
    names = [slot.names for slot in state.outline.slots]
    assert ("embedding.weight", "head.weight") in names
    assert ("first.mask", "again.mask") in names
    assert {name for group in names for name in group} == set(Net().state_dict())
    assert [tuple(t.shape) for t in state.tensors] == [slot.shape for slot in state.outline.slots]
    assert [len(owners) for owners in state.owners] == [1 + (g == ("embedding.weight", "head.weight")) for g in names]
    assert [t.dtype for t in state.unsaved.values()] == [torch.float32] * 2
    assert state.outline.problems == ()


@pytest.mark.parametrize(
    ("tensor", "fillable"),
    [
        (torch.zeros(3, 4), True),
        (torch.zeros(3, 4).t(), True),
        (torch.zeros(9)[::2], True),
        (torch.zeros(3, 4)[:, :2], True),
        (torch.zeros(()), True),
        (torch.zeros(0, 3), True),
        (torch.zeros(1, 1).expand(1, 4), False),
        (torch.zeros(6).as_strided((3, 2), (1, 1)), False),
        (torch.zeros(2, dtype=torch.complex64).conj(), False),
    ],
)
def test_only_memory_that_holds_each_element_once_is_filled_in_place(tensor: torch.Tensor, *, fillable: bool) -> None:
    module = nn.Module()
    module.register_buffer("b", tensor)
    assert collect(module).outline.slots[0].in_place is fillable
    values = torch.arange(tensor.numel()).to(tensor.dtype).reshape(tensor.shape)
    load(module, {"b": values})
    assert torch.equal(module.get_buffer("b"), values)


def fake() -> nn.Module:
    with FakeTensorMode():
        return nn.Linear(2, 2)


def functional() -> nn.Module:
    module = nn.Linear(2, 2)
    module.bias = nn.Parameter(torch._to_functional_tensor(torch.zeros(2)))
    return module


def sparse() -> nn.Module:
    module = nn.Module()
    module.register_buffer("bias", torch.eye(3).to_sparse())
    return module


def subclass() -> nn.Module:
    class Own(torch.Tensor):
        pass

    module = nn.Linear(2, 2)
    module.register_buffer("own", torch.zeros(2).as_subclass(Own))
    return module


@pytest.mark.parametrize(
    ("build", "name", "kind"),
    [
        (fake, "'weight'", "FakeTensor"),
        (functional, "'bias'", "functional"),
        (sparse, "'bias'", "sparse_coo"),
        (subclass, "'own'", "Own"),
    ],
)
def test_tensors_without_memory_of_their_own_are_refused_by_name_and_type(
    build: Callable[[], nn.Module], name: str, kind: str
) -> None:
    module = build()
    state = collect(module)
    with pytest.raises(MismatchError) as caught:
        match(state.outline, hold({"weight": torch.zeros(2, 2), "bias": torch.zeros(2)}).entries, strict=False)
    assert name in str(caught.value)
    assert kind in str(caught.value)


def test_what_no_state_dict_fills_is_named_when_it_is_on_meta() -> None:
    class Caching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = Attention()
            self.doubled = self.attention.query.weight * 2
            self.known = [self.attention.query.weight]
            self.tables = {"a": (torch.zeros(2), 1), "b": torch.zeros(2)}

    with torch.device("meta"):
        module = Caching()
    text = problem(module, Caching().state_dict())
    assert "'attention.frequencies' is on the meta device" in text
    assert "sluice.empty_init()" in text
    assert "'doubled'" in text
    assert "'tables'" in text
    assert "known" not in text
    text = problem(empty(Caching), Caching().state_dict())
    assert "'doubled'" in text
    assert "frequencies" not in text
    assert "tables" not in text


# After loading


@pytest.mark.parametrize("build", [Net, lambda: empty(Net)])
def test_loading_equals_load_state_dict(build: Callable[[], Net]) -> None:
    source = trained()
    module = build().eval()
    found, installed = load(module, source.state_dict())
    assert_equal(module, source)
    assert torch.equal(module(TOKENS), source(TOKENS))
    assert module.head.weight is module.embedding.weight
    assert module.again is module.first
    assert torch.equal(module.first.frequencies, source.first.frequencies)
    assert not any(t.is_meta for t in (*module.parameters(), *module.buffers()))
    assert [p.requires_grad for p in module.parameters()] == [p.requires_grad for p in source.parameters()]
    assert (found.missing, found.unexpected, installed.replaced) == ((), (), ())
    assert ("embedding.weight", "head.weight") in found.tied


def test_a_loaded_module_trains_copies_pickles_and_loads_as_any_other() -> None:
    source, module = trained().train(), empty()
    optimizer, reference = torch.optim.AdamW(module.parameters()), torch.optim.AdamW(source.parameters())
    held = [*module.parameters()]
    load(module, source.state_dict())
    assert all(one is other for one, other in zip(held, module.parameters(), strict=True))
    for net, optim in ((module, optimizer), (source, reference)):
        for _ in range(2):
            optim.zero_grad()
            net(TOKENS).square().mean().backward()
            optim.step()
    assert_equal(module, source)
    assert_equal(copy.deepcopy(module), source)
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    assert_equal(torch.load(buffer, weights_only=False), source)
    module.load_state_dict(trained().state_dict())
    assert_equal(module, trained())


def test_hooks_attributes_modes_and_subclasses_survive() -> None:
    class Marked(nn.Parameter):
        pass

    module = empty(lambda: nn.Linear(2, 2))
    with empty_init():
        module.bias = Marked(torch.empty(2))
    calls: list[str] = []
    weight = module.weight
    handle = weight.register_hook(lambda _: calls.append("gradient"))
    weight.register_post_accumulate_grad_hook(lambda _: calls.append("accumulated"))
    weight.no_decay = True
    module.register_forward_hook(lambda *_: calls.append("forward"))
    module.eval()
    load(module, nn.Linear(2, 2).state_dict())
    module(torch.ones(2)).sum().backward()
    assert calls == ["forward", "gradient", "accumulated"]
    assert module.weight is weight
    assert weight.no_decay
    assert weight.grad is not None
    assert type(module.bias) is Marked
    assert not module.training
    handle.remove()
    module(torch.ones(2)).sum().backward()
    assert calls[3:] == ["forward", "accumulated"]


def test_a_parameter_held_by_a_weak_reference_is_replaced_everywhere_and_named() -> None:
    module = empty()
    held = module.embedding.weight
    held.no_decay = True
    reference = weakref.ref(held)
    source = trained()
    _, installed = load(module, source.state_dict())
    assert installed.replaced == ("embedding.weight",)
    assert reference() is held is not module.embedding.weight
    assert module.head.weight is module.embedding.weight
    assert module.head.weight.no_decay
    assert_equal(module, source)


def test_a_buffer_with_a_view_is_replaced_everywhere_and_named() -> None:
    module = empty()
    view = module.first.mask[:2]
    _, installed = load(module, trained().state_dict())
    assert installed.replaced == ("first.mask",)
    assert module.again.mask is module.first.mask
    assert not module.first.mask.is_meta
    assert view.is_meta


@pytest.mark.parametrize("held", [False, True])
def test_recurrent_layers_keep_their_lists_of_weights(held: bool) -> None:
    torch.manual_seed(0)
    source = nn.LSTM(3, 4, num_layers=2)
    module = empty(lambda: nn.LSTM(3, 4, num_layers=2))
    weights = [*module.parameters()]
    references = [weakref.ref(weight) for weight in weights if held]
    _, installed = load(module, source.state_dict())
    assert len(installed.replaced) == len(references)  # those of torch's own layers do not count
    assert [one is other for one, other in zip(module.parameters(), weights, strict=True)] == [not held] * 8
    assert all(one is other for one, other in zip(module._flat_weights, module.parameters(), strict=True))
    assert not module._weights_have_changed()
    x = torch.randn(5, 1, 3)
    assert torch.equal(module(x)[0], source(x)[0])
    assert_equal(copy.deepcopy(module), source)


def test_live_tensors_are_filled_in_place_and_autograd_is_told() -> None:
    module = Net()
    module(TOKENS).sum().backward()
    weight = module.embedding.weight
    gradient, address, version = weight.grad, weight.data_ptr(), weight._version
    load(module, trained().state_dict())
    assert module.embedding.weight is weight
    assert (weight.grad, weight.data_ptr()) == (gradient, address)
    assert weight._version > version
    assert_equal(module, trained())


def test_autograd_notices_a_load_between_forward_and_backward() -> None:
    module = nn.Linear(2, 2)
    loss = module(torch.ones(2, requires_grad=True)).sum() * module.weight.prod()
    load(module, nn.Linear(2, 2).state_dict())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_live_tensors_of_another_dtype_get_new_memory_and_stay_the_same_objects() -> None:
    module = Net()
    objects = [*module.parameters()]
    source = trained()
    load(module, source.state_dict(), dtype="bfloat16")
    assert all(one is other for one, other in zip(objects, module.parameters(), strict=True))
    assert module.embedding.weight.dtype == torch.bfloat16
    assert module.first.mask.dtype == torch.bool
    assert module.norm.num_batches_tracked is not None
    assert module.norm.num_batches_tracked.dtype == torch.int64
    assert module.first.frequencies.dtype == torch.float32
    assert_equal(module, copy.deepcopy(source).bfloat16())


@pytest.mark.parametrize("dtype", [None, "auto"])
def test_dtypes_of_the_module_or_of_the_checkpoint(dtype: str | None) -> None:
    source = trained().half()
    module = empty()
    load(module, source.state_dict(), dtype=dtype)
    reference = Net()
    reference.load_state_dict(source.state_dict(), assign=dtype == "auto")
    assert {n: t.dtype for n, t in module.state_dict().items()} == {
        n: t.dtype for n, t in reference.state_dict().items()
    }
    assert torch.equal(module.first.query.weight, reference.first.query.weight)


def test_memory_layout_is_the_modules() -> None:
    def convolution() -> nn.Module:
        return nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]

    source = nn.Conv2d(3, 4, 3)
    with torch.device("meta"):
        module = convolution()
    load(module, source.state_dict())
    assert module.get_parameter("weight").is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(module.get_parameter("weight"), source.weight)


def test_loading_works_inside_inference_mode() -> None:
    module = empty()
    with torch.inference_mode():
        load(module, {n: t for n, t in trained().state_dict().items() if n != "layers.1.bias"}, strict=False)
    assert not any(t.is_inference() for t in (*module.parameters(), *module.buffers()))
    assert_equal(module, trained())


@pytest.mark.gpu
def test_a_device_is_given_to_everything_the_forward_pass_needs() -> None:
    module = Net()
    objects = [*module.parameters(), *module.buffers()]
    partial = {name: t for name, t in trained().state_dict().items() if not name.startswith("layers")}
    load(module, partial, placement={"": "cuda:0"}, strict=False)
    assert all(one is other for one, other in zip(objects, (*module.parameters(), *module.buffers()), strict=True))
    assert {t.device for t in objects} == {torch.device("cuda:0")}
    module(TOKENS.cuda())


# Old checkpoints, hooks, extra state


@pytest.mark.parametrize("version", [None, 1, 2])
@pytest.mark.parametrize("build", [lambda: nn.BatchNorm1d(3), lambda: empty(lambda: nn.BatchNorm1d(3))])
def test_batch_norm_without_its_counter(build: Callable[[], nn.Module], version: int | None) -> None:
    state_dict: OrderedDict[str, torch.Tensor] = OrderedDict(nn.BatchNorm1d(3).state_dict())
    del state_dict["num_batches_tracked"]
    reference = nn.BatchNorm1d(3)
    versions = {} if version is None else {"": version}
    if version is not None:
        state_dict._metadata = {"": {"version": version}}  # type: ignore[attr-defined]
    module = build()
    if version == 2:
        assert "num_batches_tracked" in problem(module, state_dict, versions=versions)
        with pytest.raises(RuntimeError, match="num_batches_tracked"):
            reference.load_state_dict(state_dict)
        return
    reference.load_state_dict(state_dict)
    found, _ = load(module, state_dict, versions=versions)
    assert found.missing == ()
    assert_equal(module, reference)


def test_batch_norm_keeps_a_live_counter() -> None:
    module = nn.BatchNorm1d(3)
    module(torch.randn(4, 3))
    load(module, {n: t for n, t in nn.BatchNorm1d(3).state_dict().items() if n != "num_batches_tracked"})
    assert module.num_batches_tracked == 1


@pytest.mark.filterwarnings(OLD_WEIGHT_NORM)
def test_pre_hooks_that_rename_are_followed() -> None:
    def build() -> nn.Module:
        return nn.Sequential(parametrizations.weight_norm(nn.Linear(3, 4)), nn.Linear(4, 2))

    old = nn.Sequential(nn.utils.weight_norm(nn.Linear(3, 4)), nn.Linear(4, 2))
    assert "0.weight_g" in old.state_dict()
    for module in (build(), empty(build)):
        load(module, old.state_dict())
        reference = build()
        reference.load_state_dict(old.state_dict())
        assert_equal(module, reference)
        assert torch.equal(module(torch.ones(3)), reference(torch.ones(3)))


def test_pre_hooks_see_and_change_what_load_state_dict_shows_them() -> None:
    seen: list[list[str]] = []

    def drop(_: nn.Module, state_dict: dict[str, torch.Tensor], prefix: str, *__: object) -> None:
        seen.append([*state_dict])
        state_dict.pop(f"{prefix}obsolete", None)

    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module[1].register_load_state_dict_pre_hook(drop)  # type: ignore[no-untyped-call]
    state_dict = {**nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).state_dict(), "1.obsolete": torch.zeros(1)}
    load(module, state_dict)
    module.load_state_dict(state_dict)
    assert seen[0] == seen[1] == ["1.weight", "1.bias", "1.obsolete"]


def test_pre_hooks_that_compute_fail_or_reject_are_named() -> None:
    def compute(state_dict: dict[str, torch.Tensor], *_: object) -> None:
        state_dict["weight"] = state_dict["weight"].flip(0)

    def read(state_dict: dict[str, torch.Tensor], *_: object) -> None:
        state_dict["weight"].tolist()

    def reject(*arguments: Any) -> None:
        arguments[-1].append("too old")

    for hook, text in ((compute, "computes a tensor"), (read, "failed on"), (reject, "too old")):
        module = nn.Linear(2, 2)
        module._register_load_state_dict_pre_hook(hook)  # type: ignore[no-untyped-call]
        assert text in str(follow_loading(module, hold(nn.Linear(2, 2).state_dict()).entries).problems)
        assert text in problem(module, nn.Linear(2, 2).state_dict())


def test_post_hooks_run_children_first_with_what_was_missing() -> None:
    calls: list[tuple[str, list[str]]] = []
    module = nn.Sequential(nn.Linear(2, 2))
    for name, part in module.named_modules():
        part.register_load_state_dict_post_hook(lambda _, keys, name=name: calls.append((name, keys.missing_keys)))
    load(module, {"0.weight": torch.zeros(2, 2)}, strict=False)
    assert calls == [("0", ["0.bias"]), ("", ["0.bias"])]


@pytest.mark.filterwarnings(OLD_WEIGHT_NORM)
def test_attributes_that_hooks_compute_before_each_forward_are_no_leftovers() -> None:
    def build() -> nn.Module:
        return nn.Sequential(
            nn.utils.weight_norm(nn.Linear(3, 3)),
            prune.identity(nn.Linear(3, 3), "weight"),  # type: ignore[no-untyped-call]
        )

    source, module = build(), empty(build)
    load(module, source.state_dict())
    assert torch.equal(module(torch.ones(3)), source(torch.ones(3)))


# Missing tensors


def test_missing_tensors_on_meta_are_initialised_by_their_module() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(30, 40), nn.BatchNorm1d(40), nn.Linear(40, 5))

    source = build()
    state_dict = {n: t for n, t in source.state_dict().items() if n not in {"0.bias", "1.weight", "1.running_var"}}
    module = empty(build)
    found, _ = load(module, state_dict, strict=False, dtype="bfloat16")
    assert found.missing == ("0.bias", "1.weight", "1.running_var")
    assert torch.equal(module[0].weight, source.get_parameter("0.weight").bfloat16())
    assert 0 < module[0].bias.abs().max() <= 1 / 30**0.5
    assert torch.equal(module[1].running_var, torch.ones(40, dtype=torch.bfloat16))
    assert {t.dtype for t in module.parameters()} == {torch.bfloat16}
    assert all(p.requires_grad for p in module.parameters())


def test_missing_live_tensors_keep_their_values() -> None:
    module = nn.Linear(2, 2)
    before = module.bias.clone()
    found, _ = load(module, {"weight": torch.zeros(2, 2)}, strict=False)
    assert torch.equal(module.bias, before)
    assert found.missing == ("bias",)
    assert module.weight.abs().max() == 0


class Odd(nn.Module):
    """A module whose reset leaves one tensor out."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))
        self.forgotten = nn.Parameter(torch.zeros(3))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)


class Failing(Odd):
    def reset_parameters(self) -> None:
        raise ValueError("no data")


def test_what_reset_parameters_leaves_out_or_fails_on_is_named_and_nothing_changes() -> None:
    assert "'forgotten'" in problem(empty(Odd), {"weight": torch.ones(3)}, strict=False)
    assert "Failing" in problem(empty(Failing), {"weight": torch.ones(3)}, strict=False)
    module = empty(Odd)
    load(module, {"forgotten": torch.ones(3)}, strict=False)
    assert torch.equal(module.weight, torch.ones(3))


def test_reset_parameters_is_not_run_where_it_would_overwrite_live_tensors() -> None:
    module = empty(lambda: nn.Linear(2, 2))
    module.weight = nn.Parameter(torch.full((2, 2), 7.0))
    assert "reset_parameters" in problem(module, {"weight": torch.zeros(2, 2)}, strict=False)
    assert torch.equal(module.weight, torch.full((2, 2), 7.0))


def test_initial_values_leave_the_module_as_it_is() -> None:
    module = empty(lambda: nn.Sequential(nn.Linear(3, 3)))
    weight = module[0].weight
    state = collect(module)
    found = match(state.outline, {}, strict=False)
    values = memory_for(state, found, {})
    initial_values(state, found, values, scratch_bytes=1 << 20)
    assert len(values) == 2
    assert module[0].weight is weight
    assert weight.is_meta


# Swapping


def test_a_swap_is_refused_without_a_trace() -> None:
    parameter = nn.Parameter(torch.empty(2, device="meta"))
    parameter.mark = 1  # type: ignore[attr-defined]
    reference = weakref.ref(parameter)
    assert not swap_data(parameter, torch.ones(2))
    assert parameter.is_meta
    assert vars(parameter) == {"mark": 1}
    assert reference() is parameter
    del reference
    assert swap_data(parameter, torch.ones(2))
    assert torch.equal(parameter.detach(), torch.ones(2))
    assert vars(parameter) == {"mark": 1}


def test_wrapped_models_load_their_own_names() -> None:
    class Wrapper(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

        def names(self) -> Iterator[str]:
            return iter(self.state_dict())

    source, wrapped = Wrapper(trained()), empty(lambda: Wrapper(Net()))
    load(wrapped, source.state_dict())
    assert_equal(wrapped, source)
    assert next(source.names()).startswith("module.")
