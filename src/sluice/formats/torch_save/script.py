r"""TorchScript archives (``torch.jit.save``): the parameters and buffers of the module, without its code.

Records besides those of ``torch.save`` (``zip_format``)::

    NAME/data.pkl                       the module: objects of classes below ``__torch__``, filled with attributes
    NAME/code/__torch__/PACKAGE.py      its classes as text, compressed, with the names of parameters and buffers
    NAME/constants.pkl, constants/KEY   values that only the code uses; not read

The result is the state dict of ``torch.jit.load``: attribute paths of parameters and buffers. The lines
``__parameters__ = [...]`` and ``__buffers__ = [...]`` of a class name them; nothing else of the code is looked at, and
nothing is run. Other attributes of a module are left out, tensors with a note. Without any such line, as in archives
whose code was removed, all tensors count.

Limits: ``Limits.header_bytes`` of code, unpacked; those of the inert unpickler.
Refused: two tensors with one path; an object that is not a module; frozen programs, whose weights are constants.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Mapping
from functools import partial

from msgspec.structs import replace

from sluice._errors import FormatError, UnsupportedError
from sluice._messages import listed
from sluice._options import Limits
from sluice.formats.archives.zip_directory import CentralDirectory
from sluice.formats.archives.zip_records import read_record
from sluice.formats.pickles.unpickler import Constructor, PendingObject
from sluice.formats.torch_save.allowlist import TorchAllowlist
from sluice.records import Entry, Opaque, UnsupportedValue
from sluice.sources.protocol import Source

__all__ = ["ScriptAllowlist", "declared_tensors"]

_CLASS = re.compile(rb"^class (\w+)\(Module\):\n  __parameters__ = \[(.*)\]\n  __buffers__ = \[(.*)\]$", re.MULTILINE)
_NAME = re.compile(rb'"([^"\\]+)"')

#: Package of all classes of an archive.
_CLASSES = "__torch__"


class ScriptAllowlist(TorchAllowlist):
    """The permitted globals of the pickle of one module: those of ``torch.save``, and the classes of the archive."""

    def __init__(self, limits: Limits, pickle_bytes: int, *, big_endian: bool = False) -> None:
        super().__init__(limits, pickle_bytes, big_endian=big_endian)
        #: Attributes and class of each object, by the ``id`` of its attributes.
        self._objects: dict[int, tuple[dict[object, object], str]] = {}

    def find(self, module: str, name: str) -> object | None:
        if module.partition(".")[0] == _CLASSES:
            kind = f"{module}.{name}"
            return Constructor(qualified_name=kind, build=partial(self._create, kind), creates=True)
        if module == "torch.jit._pickle":
            return _first_argument  # lists and their types
        return super().find(module, name)

    def _create(self, kind: str, arguments: tuple[object, ...]) -> object:
        del arguments
        return PendingObject(finish=partial(self._fill, kind))

    def _fill(self, kind: str, state: object) -> object:
        if type(state) is not dict:
            raise UnsupportedError("an object whose state only its code can restore", found=kind)
        self._objects[id(state)] = state, kind
        return state

    def state_dict(
        self, root: object, declared: Mapping[str, frozenset[str]], file: str
    ) -> tuple[OrderedDict[str, object], tuple[str, ...]]:
        """Return the state dict of a module that was checked as a tree, and a note on the tensors left out.

        Args:
            root: The module.
            declared: See ``declared_tensors``.
            file: Path of the file, for error messages.

        Raises:
            FormatError: It is not a module, or two tensors have one path.
        """
        if id(root) not in self._objects:
            raise FormatError("the TorchScript archive does not hold a module", file=file, found=type(root).__name__)
        found: OrderedDict[str, object] = OrderedDict()
        without_gradients: dict[int, Entry] = {}
        others: list[str] = []
        pending = [("", root)]
        while pending:
            prefix, module = pending.pop()
            attributes, kind = self._objects[id(module)]
            own = declared.get(kind, frozenset()) if declared else None
            inner = []
            for name, value in attributes.items():
                path = f"{prefix}{name}"
                if id(value) in self._objects:
                    inner.append((f"{path}.", value))
                elif isinstance(value, (Entry, UnsupportedValue)) and own is not None and name not in own:
                    others.append(path)
                elif isinstance(value, (Entry, UnsupportedValue)):
                    if path in found:
                        raise FormatError("two tensors of the module have one path", file=file, tensor=path)
                    found[path] = _detached(value, without_gradients)
            pending += reversed(inner)
        left_out = "Tensors of the program that are neither parameters nor buffers, left out"
        return found, (f"{listed(left_out, others)}.",) if others else ()


def _first_argument(arguments: tuple[object, ...]) -> object:
    if not arguments:
        raise FormatError("a list of a TorchScript archive has no elements")
    return arguments[0]


def _detached(value: Entry | Opaque, known: dict[int, Entry]) -> Entry | Opaque:
    """Return a tensor as in a state dict, without gradients; shared tensors stay shared."""
    if not isinstance(value, Entry) or not value.requires_grad:
        return value
    return known.setdefault(id(value), replace(value, requires_grad=False))


def declared_tensors(source: Source, directory: CentralDirectory, limits: Limits) -> Mapping[str, frozenset[str]]:
    """Return the names of parameters and buffers that the text of each class of an archive declares.

    Raises:
        LimitError: The code has more than ``limits.header_bytes`` bytes.
        FormatError: A record is damaged.
    """
    declared: dict[str, frozenset[str]] = {}
    left = limits.header_bytes
    start = f"{directory.archive}/code/"
    for record in directory.records():
        if not record.name.startswith(start) or not record.name.endswith(".py"):
            continue
        _, text = read_record(source, record, left)
        left -= len(text)
        module = record.name[len(start) : -len(".py")].replace("/", ".")
        for name, parameters, buffers in _CLASS.findall(text):
            names = _NAME.findall(parameters) + _NAME.findall(buffers)
            declared[f"{module}.{name.decode()}"] = frozenset(each.decode("utf-8", "replace") for each in names)
    return declared
