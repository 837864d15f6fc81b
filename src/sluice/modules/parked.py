"""Parameters whose weights are not in memory.

A parked parameter answers what it is (shape, dtype, the device that it runs on) and refuses to be used. A model that
holds some refuses what would need all weights: to be moved, cast, copied, pickled or saved.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, Self

import torch
from torch import nn

from sluice._errors import StreamError

__all__ = ["Guard", "ParkedParameter"]


#: What can be asked of a tensor without its elements, by the names of attributes and methods.
_DESCRIPTIONS = frozenset(
    {"shape", "dtype", "ndim", "layout", "nbytes", "itemsize", "requires_grad", "grad", "grad_fn", "is_leaf"}
    | {"size", "dim", "numel", "nelement", "stride", "element_size", "is_contiguous", "storage_offset", "data_ptr"}
    | {"is_floating_point", "is_complex", "is_sparse", "is_quantized", "is_nested", "__hash__", "requires_grad_"}
)


class ParkedParameter(nn.Parameter):
    """A parameter without its weights; see the head of this module."""

    _path: str
    _running_on: torch.device

    @classmethod
    def of(cls, parameter: torch.Tensor, path: str, device: torch.device) -> Self:
        """Return the parked form of a parameter on the meta device.

        Args:
            parameter: The parameter.
            path: Its name in the model.
            device: Device of its weights while they are in memory.
        """
        with torch.no_grad():
            parked = torch.Tensor._make_subclass(cls, parameter.detach(), False)  # noqa: SLF001, FBT003  as Parameter does
        parked._path, parked._running_on = path, device
        return parked

    def __repr__(self, *, tensor_contents: object = None) -> str:
        del tensor_contents
        return f"ParkedParameter({self._path!r}, shape={tuple(self.shape)}, dtype={self.dtype})"

    def __deepcopy__(self, memo: object) -> NoReturn:
        self._refuse("be copied")

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        self._refuse("be pickled")

    def _refuse(self, what: str) -> NoReturn:
        raise StreamError(f"a streamed model cannot {what}", tensor=self._path)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = _name_of(func)
        if name == "device":
            return args[0]._running_on
        if name == "is_meta":
            return False
        if name in _DESCRIPTIONS:
            with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001  as the documentation of torch does
                return func(*args, **(kwargs or {}))
        own = next((each for each in _flatten(args, kwargs) if isinstance(each, cls)), None)
        raise StreamError(
            f"{name} needs a weight that is not in memory, because its block is "
            "not running",
            tensor=None if own is None else own._path,
            advice="Close the stream first; or, if a part of the model uses weights of another part without calling "
            "it, name the module around both in blocks=.",
        )


def _name_of(func: Callable[..., Any]) -> str:
    """Return the name of a function of torch, or of the attribute that is read."""
    name = getattr(func, "__name__", "an operation")
    return getattr(func.__self__, "__name__", name) if name == "__get__" else name  # type: ignore[attr-defined]


def _flatten(args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> list[Any]:
    values = [*args, *(kwargs or {}).values()]
    return [each for value in values for each in (value if isinstance(value, (list, tuple)) else (value,))]


class Guard:
    """Makes a module refuse what would need all its weights, until it is removed."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._hooks = [
            module.register_state_dict_pre_hook(lambda *_: _refuse("be saved")),
            module.register_load_state_dict_pre_hook(lambda *_: _refuse("be loaded into")),
        ]
        for part in module.modules():
            vars(part)["_apply"] = _refuse_to_move

    def remove(self) -> None:
        """Let the module be an ordinary one again."""
        for hook in self._hooks:
            hook.remove()
        for part in self._module.modules():
            vars(part).pop("_apply", None)


def _refuse_to_move(*_args: object, **_kwargs: object) -> NoReturn:
    _refuse("be moved or cast")


def _refuse(what: str) -> NoReturn:
    raise StreamError(f"a streamed model cannot {what}")
