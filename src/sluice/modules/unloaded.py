"""Weights that are not in memory: the parameters of a stream, and modules that refuse calls until they are loaded.

A parked parameter answers what it is (shape, dtype, the device that it runs on). If an operation needs its elements,
because a part of the model uses weights of a different part without calling it, they are read for that operation; what
would change them, copy or pickle them, or use their storage is refused. State dicts have the parked parameters
themselves, so that their names are found, and nothing can be saved. A model that holds parked parameters refuses to be
moved, cast, copied and pickled.

torch does not refuse calls: a linear layer or a convolution with weights on meta, called with input on the CPU, returns
numbers, and so does a module that a failed load has filled in part.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from itertools import chain
from typing import Any, NoReturn, Self

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from sluice._errors import PartialLoadError, RankError, StreamError
from sluice.modules.install import note_written
from sluice.modules.leftovers import map_tensors, tensors_in
from sluice.modules.swap import writes

__all__ = ["Guard", "ParkedParameter", "is_partly_loaded", "refuse_calls", "refuse_streamed", "refusing"]

#: Attribute of tensors that a failed load may have changed: their version then. Not a table with weak references, with
#: which torch does not swap tensors.
_MARK = "_sluice_changed_at"

#: Attributes and methods of tensors that do not need the elements.
_DESCRIPTIONS = frozenset(
    {"shape", "dtype", "ndim", "layout", "nbytes", "itemsize", "requires_grad", "grad", "grad_fn", "is_leaf"}
    | {"size", "dim", "numel", "nelement", "stride", "element_size", "is_contiguous", "storage_offset", "data_ptr"}
    | {"is_floating_point", "is_complex", "is_sparse", "is_quantized", "is_nested", "__hash__", "requires_grad_"}
)

#: Levels of containers in the arguments of a function of torch.
_NESTING = 8

#: Methods that return the memory of the elements.
_STORAGES = frozenset({"untyped_storage", "storage", "_typed_storage", "__dlpack__"})

#: Assignments that change no element.
_SETTERS = (torch.Tensor.requires_grad.__set__, torch.Tensor.grad.__set__)  # type: ignore[attr-defined, union-attr]


class ParkedParameter(nn.Parameter):
    """A parameter without its weights; see the head of this module."""

    #: Its name in the model.
    path: str
    #: Device of its weights while they are in memory.
    runs_on: str
    #: Reads its weights, and holds them in memory for a block.
    lend: Callable[[], AbstractContextManager[torch.Tensor]] | None

    @classmethod
    def of(cls, parameter: torch.Tensor, path: str, device: str) -> Self:
        """Return the parked form of a parameter on the meta device.

        Args:
            parameter: The parameter.
            path: Its name in the model.
            device: Device of its weights while they are in memory.
        """
        # As Parameter does.
        parked = torch.Tensor._make_subclass(cls, parameter.detach(), parameter.requires_grad)  # noqa: SLF001
        parked.path, parked.runs_on, parked.lend = path, device, None
        return parked

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        del tensor_contents
        return f"ParkedParameter({self.path!r}, shape={tuple(self.shape)}, dtype={self.dtype})"

    def __deepcopy__(self, memo: object) -> NoReturn:
        self.refuse("be copied")

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        self.refuse("be pickled")

    def borrow(self) -> AbstractContextManager[torch.Tensor]:
        """Return the context in which its weights are in memory."""
        if self.lend is None:
            self.refuse("use its weights any more")
        return self.lend()

    def refuse(self, what: str) -> NoReturn:
        """Raise the error for what needs the weights."""
        raise StreamError(f"a streamed model cannot {what}", tensor=self.path)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = _name_of(func)
        if name == "device":
            return torch.device(args[0].runs_on)
        if name == "is_meta":
            return False
        if name == "detach":  # as in state dicts
            return args[0]
        if name in _DESCRIPTIONS or func in _SETTERS:
            with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001  as the documentation of torch does
                return func(*args, **(kwargs or {}))
        changed = ((args[:1] or kwargs) if writes(name) else (), (kwargs or {}).get("out"))
        for own in tensors_in(changed, _NESTING):
            if isinstance(own, cls):
                own.refuse(f"change its weights, as {name} does")
        if name in _STORAGES:  # as libraries that save tensors do
            own = next(each for each in tensors_in((args, kwargs), _NESTING) if isinstance(each, cls))
            own.refuse("lend the storage of its weights")
        with ExitStack() as stack:

            def lent(tensor: torch.Tensor) -> torch.Tensor:
                return stack.enter_context(tensor.borrow()) if isinstance(tensor, ParkedParameter) else tensor

            lent_args, lent_kwargs = map_tensors((args, kwargs or {}), lent)
            return func(*lent_args, **lent_kwargs)


def _name_of(func: Callable[..., Any]) -> str:
    """Return the name of a function of torch, or of the attribute that is read."""
    name = getattr(func, "__name__", "an operation")
    return getattr(func.__self__, "__name__", name) if name == "__get__" else name  # type: ignore[attr-defined]


class Guard:
    """Makes a module refuse what would need all its weights, until it is removed."""

    def __init__(self, module: nn.Module) -> None:
        self._parts = list(module.modules())  # the caller may take some out
        self._hook = module.register_load_state_dict_pre_hook(_refuse_loading)  # type: ignore[no-untyped-call]
        for part in self._parts:
            vars(part)["_apply"] = partial(_apply, part, whole=part is module)
            vars(part)["__getstate__"] = _refuse_state

    def remove(self) -> None:
        """Let the module be an ordinary one again."""
        self._hook.remove()
        for part in self._parts:
            vars(part).pop("_apply", None)
            vars(part).pop("__getstate__", None)


def refuse_streamed(module: nn.Module, what: str, advice: str = "End the stream first.") -> None:
    """Raise the error for what cannot be done if a ``Guard`` watches the module or a part, because it is streamed."""
    for part in module.modules():
        if vars(part).get("__getstate__") is _refuse_state:
            raise StreamError(f"a streamed model cannot {what}", advice=advice)


def _refuse_loading(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: object) -> None:
    """Refuse a state dict that has weights of the stream; others, such as those of an adapter, may be loaded."""
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if prefix + name in state_dict and type(parameter) is ParkedParameter:
            parameter.refuse("be loaded into")


def _apply(module: Any, fn: Callable[[torch.Tensor], torch.Tensor], *args: Any, whole: bool, **kwargs: Any) -> Any:
    """Move or cast a part whose weights are all in memory, as the forward of some models does.

    What moves a model to where it is passes, as training loops do: parked weights are left alone.
    """
    parked = {name: each for name, each in module._parameters.items() if type(each) is ParkedParameter}  # noqa: SLF001
    guarded = (part for part in module.modules() if "_apply" in vars(part))  # adapters that were added are not
    for each in chain.from_iterable(part.parameters(recurse=False) for part in guarded) if whole else parked.values():
        probe = torch.empty(0, dtype=each.dtype, device=each.device)
        if each.is_meta or (moved := fn(probe)).dtype != probe.dtype or moved.device != probe.device:
            _refuse_all("be moved or cast")
    module._parameters.update(dict.fromkeys(parked))  # noqa: SLF001
    try:
        return type(module)._apply(module, fn, *args, **kwargs)  # noqa: SLF001  overridden in this module
    finally:
        module._parameters.update(parked)  # noqa: SLF001


def _refuse_state() -> NoReturn:
    _refuse_all("be copied or pickled")


def _refuse_all(what: str) -> NoReturn:
    raise StreamError(f"a streamed model cannot {what}")


class _Refusal:
    """Hook of modules that raises when they are called while weights are missing; copies of modules have their own."""

    #: Whether there has been one in this process.
    made = False

    def __init__(self, torn: Sequence[torch.Tensor]) -> None:
        """Mark tensors that a failed load may have changed, also for autograd."""
        _Refusal.made, self._torn = True, torn
        for tensor in torn:
            note_written(tensor)
            vars(tensor)[_MARK] = _version(tensor)

    def __reduce__(self) -> tuple[Any, ...]:
        # Copies of parameters do not have the marks; this one is made with the same copies as the module.
        return _Refusal, ([tensor for tensor in self._torn if _is_torn(tensor)],)

    def __call__(self, module: nn.Module, args: Any) -> None:  # noqa: ARG002  the signature of torch
        name = _missing(module)
        if name is not None:
            raise StreamError(
                "the weights are not in memory: the load failed, or the stream has ended",
                tensor=name,
                advice="Load them with sluice.load_into or load_state_dict, or run the model inside of sluice.stream.",
            )


def refuse_calls(module: nn.Module, *, partly: bool = False) -> None:
    """Make every part of a module that has weights on meta, or changed by a failed load, raise when it is called.

    Calls while all of them are in memory succeed, and so do those with other weights, such as restored ones. A load or
    a stream of the module ends this. ``partly`` says that a load has just failed that may have changed any weight.
    If ``load_state_dict`` restored parts one by one, the hook of the module stays, and refuses nothing.
    """
    torn = [each for each in _tensors(module).values() if (partly or _is_torn(each)) and not is_lazy(each)]
    _accept_calls(module)
    _Refusal(torn)
    for part in module.modules():
        if _missing(part) is not None:
            refusal = _Refusal([each for each in _tensors(part).values() if _is_torn(each)])  # copied with the part
            # Not the methods of the part: those of ScriptModules raise, and call the hooks nevertheless.
            nn.Module.register_forward_pre_hook(part, refusal, prepend=True)
            nn.Module.register_load_state_dict_post_hook(part, _accept_restored)  # type: ignore[no-untyped-call]
    if torn and "torch._dynamo" in sys.modules:
        torch.compiler.reset()  # compiled code does not look for new hooks


def is_partly_loaded(module: nn.Module) -> bool:
    """Return whether a failed load has changed some of the weights, and they are neither loaded nor restored since."""
    return any(map(_is_torn, _tensors(module).values()))


@contextmanager
def refusing(module: nn.Module) -> Iterator[None]:
    """Refuse calls of the module after a failure of the block, which loads or streams it, and accept them otherwise."""
    try:
        yield
    except BaseException as error:
        refuse_calls(module, partly=_is_partial(error))
        raise
    if _Refusal.made:
        _accept_calls(module)


def _accept_calls(module: nn.Module, kept: object = None) -> None:
    for part in module.modules():
        for hooks in (part._forward_pre_hooks, part._load_state_dict_post_hooks):  # noqa: SLF001
            for number, hook in list(hooks.items()) if hooks is not kept else ():
                if isinstance(hook, _Refusal) or hook is _accept_restored:
                    del hooks[number]
    for tensor in _tensors(module).values():
        vars(tensor).pop(_MARK, None)


def _accept_restored(module: nn.Module, keys: Any) -> None:
    """Accept calls after ``load_state_dict``. Not in the hook of calls: ``functional_call`` lends weights for one."""
    hooks = module._load_state_dict_post_hooks  # noqa: SLF001  torch loops over them now
    if not keys.missing_keys:
        for each in filter(torch.Tensor.is_inference, _tensors(module).values()):  # they have no version
            vars(each).pop(_MARK, None)
    if _missing(module) is None:
        _accept_calls(module, None if next(reversed(hooks.values())) is _accept_restored else hooks)


def _is_partial(error: BaseException) -> bool:
    """Return whether a load failed after live tensors began to change; an interrupt has the text of that as a note."""
    if not isinstance(error, Exception):
        return bool(getattr(error, "__notes__", None))
    if isinstance(error, RankError) and (error.torn or (error.changed and error.ranks.keys() - error.changed)):
        return True  # on every rank: otherwise some would wait in a call for those that refuse it
    return isinstance(error, PartialLoadError) or isinstance(error.__cause__, PartialLoadError)


def _tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    return dict(chain(module.named_parameters(), module.named_buffers()))


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version  # noqa: SLF001  it has no public name


def _is_torn(tensor: torch.Tensor) -> bool:
    return hasattr(tensor, _MARK) and getattr(tensor, _MARK) == _version(tensor)


def _missing(module: nn.Module) -> str | None:
    """Return the name of the first tensor whose values are not there."""
    return next((name for name, tensor in _tensors(module).items() if tensor.is_meta or _is_torn(tensor)), None)
