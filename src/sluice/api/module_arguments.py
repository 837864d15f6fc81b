"""The arguments that the verbs for modules share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from sluice._arguments import check_load, dtype_argument, memory_limits
from sluice._options import TransferOptions
from sluice.adapters.config import adapter_list
from sluice.loading.module_request import ModuleRequest

__all__ = ["check_shared", "module_request"]

_Request = TypeVar("_Request", bound=ModuleRequest)

#: Arguments of ``check_load``.
_CHECKED = (
    *("key", "limits", "rename", "rules", "strict", "allow_empty", "ignore_mismatched"),
    *("place", "page_cache", "share", "progress"),
)


def check_shared(arguments: Mapping[str, Any]) -> None:
    """Check those of the arguments of a verb that all loads share; see ``check_load``."""
    check_load(**{name: arguments[name] for name in _CHECKED if name in arguments})


def module_request(kind: type[_Request], arguments: Mapping[str, Any], **own: Any) -> _Request:
    """Return the request of a load into a module, from the arguments of a verb, which have been checked.

    Args:
        kind: Its class.
        arguments: The arguments by name; those that are no fields of the request are left out.
        own: Fields that differ from the arguments of their names.
    """
    fields = {name: arguments[name] for name in kind.__struct_fields__ if name in arguments}
    limits = memory_limits(arguments.get("memory"))
    moved = {name: arguments[name] for name in ("page_cache", "place") if name in arguments}
    options = TransferOptions(memory=limits, **moved)
    parsed = {"dtype": dtype_argument(arguments.get("dtype")), "adapters": adapter_list(arguments.get("adapters"))}
    return kind(**{**fields, **parsed, "options": options, **own})
