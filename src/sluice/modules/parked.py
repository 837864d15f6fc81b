"""Parameters whose weights are not in memory.

A parked parameter answers what it is (shape, dtype, the device that it runs on). If an operation needs its elements,
because a part of the model uses weights of a different part without calling it, they are read for that operation; what
would change them, copy or pickle them, or use their storage is refused. State dicts have the parked parameters
themselves, so that their names are found, and nothing can be saved. A model that holds parked parameters refuses to be
moved, cast, copied and pickled.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from itertools import chain
from typing import Any, NoReturn, Self

import torch
from torch import nn

from sluice._errors import StreamError
from sluice.modules.leftovers import map_tensors, tensors_in
from sluice.modules.swap import writes

__all__ = ["Guard", "ParkedParameter", "is_guarded"]


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
        own = next(each for each in tensors_in((args, kwargs), _NESTING) if isinstance(each, cls))
        if writes(name) or (kwargs and kwargs.get("out") is not None):
            own.refuse(f"change its weights, as {name} does")
        if name in _STORAGES:  # as libraries that save tensors do
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
        self._module = module
        self._hook = module.register_load_state_dict_pre_hook(_refuse_loading)  # type: ignore[no-untyped-call]
        for part in module.modules():
            vars(part)["_apply"] = partial(_apply, part, whole=part is module)
            vars(part)["__getstate__"] = _refuse_state

    def remove(self) -> None:
        """Let the module be an ordinary one again."""
        self._hook.remove()
        for part in self._module.modules():
            vars(part).pop("_apply", None)
            vars(part).pop("__getstate__", None)


def is_guarded(module: nn.Module) -> bool:
    """Return whether a ``Guard`` watches the module, because it is streamed."""
    return vars(module).get("__getstate__") is _refuse_state


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
            _refuse("be moved or cast")
    module._parameters.update(dict.fromkeys(parked))  # noqa: SLF001
    try:
        return type(module)._apply(module, fn, *args, **kwargs)  # noqa: SLF001  overridden in this module
    finally:
        module._parameters.update(parked)  # noqa: SLF001


def _refuse_state() -> NoReturn:
    _refuse("be copied or pickled")


def _refuse(what: str) -> NoReturn:
    raise StreamError(f"a streamed model cannot {what}")
