"""The place of a model, and the library: the only module that imports transformers, public and private parts.

A model is in a local directory, or in one commit of a model of the hub, whose configuration is copied.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from importlib import import_module
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

from msgspec import Struct

from sluice._arguments import path_argument
from sluice._errors import MissingFileError, SluiceError
from sluice._options import DEFAULT_LIMITS, Limits
from sluice.formats.protocol import read_whole
from sluice.sources.directory import Directory
from sluice.sources.remote_names import names_a_file

__all__ = ["FoundModel", "bitsandbytes_operations", "find_library", "find_model"]

#: Supported releases of transformers: the first, and the first unsupported one.
VERSIONS = ((5, 20), (5, 25))

#: Classes and functions that sluice uses, by their modules.
_NAMES = {
    "transformers.modeling_utils": ("PreTrainedModel", "local_torch_dtype"),
    "transformers.initialization": ("no_init_weights", "no_tie_weights"),
    "transformers.conversion_mapping": ("get_model_conversion_mapping",),
    "transformers.core_model_loading": ("WeightConverter", "WeightRenaming", "dot_natural_key", "rename_source_key"),
    "transformers.monkey_patching": ("apply_patches", "patch_output_recorders"),
    "transformers.quantizers.auto": ("get_hf_quantizer",),
}

#: Names that transformers looks for on the hub: a model, or an owner and a model.
_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?", re.ASCII)

#: Files of a model that transformers reads besides its weights.
_CONFIGURATION = ("config.json", "generation_config.json", "adapter_config.json")


class FoundModel(Struct, frozen=True, kw_only=True):
    """Where the files of one model are."""

    #: Local directory with its configuration.
    folder: str
    #: Name that the caller passed.
    name: str
    #: Directory of its weights, or their URL at one commit.
    weights: str
    #: Names of all files, of a model of the hub.
    names: frozenset[str] = frozenset()


@contextmanager
def find_model(directory: object, revision: str | None, limits: Limits | None) -> Iterator[FoundModel]:
    """Find a model; a local directory wins over a model of the hub with its name.

    Raises:
        UnsupportedError: huggingface_hub is not installed.
        MissingFileError: The hub has no such model or revision, or that has no ``config.json``.
        RemoteError: The hub refuses or does not answer, and the model is not in its cache.
        ValueError: A local directory has a revision.
    """
    path = path_argument(directory, "directory")
    if os.path.lexists(path) or not _ID.fullmatch(path) or names_a_file(path):
        if revision is not None:
            raise ValueError(f"revision={revision!r} has no effect: {path!r} does not name a model of the hub")
        yield FoundModel(folder=path, name=path, weights=path)
        return
    from sluice.sources.remote.opening import open_commit  # here, not above: local models do without

    weights, commit = open_commit(f"hf://{path}" + ("" if revision is None else f"@{quote(revision, safe='')}"))
    with tempfile.TemporaryDirectory(prefix="sluice-") as folder:
        names = _copy(commit, folder, limits or DEFAULT_LIMITS)
        try:
            yield FoundModel(folder=folder, name=path, weights=weights, names=names)
        except SluiceError as error:
            if str(error.file or "").startswith(folder):
                error.file = weights + str(error.file)[len(folder) :]
            raise


def _copy(commit: Directory, folder: str, limits: Limits) -> frozenset[str]:
    """Copy the configuration; return the names of all files."""
    names = frozenset(entry.name for entry in commit.entries() if entry.kind == "file")
    for name in names.intersection(_CONFIGURATION):
        with closing(commit.open(name)) as source, open(os.path.join(folder, name), "wb") as file:
            file.write(read_whole(source, limits, name))
    if not os.listdir(folder):
        raise MissingFileError("the model has no config.json", file=commit.path)
    return names


def find_library() -> Any:
    """Import transformers and the private functions that sluice uses.

    Raises:
        ImportError: It is not installed, or its version is not supported.
    """
    (*_, first), (*_, end) = VERSIONS
    advice = f"pip install 'sluice[hf]' installs transformers 5.{first} or later, below 5.{end}"
    try:
        import transformers
    except ImportError as error:
        raise ImportError(f"sluice.hf needs transformers: {advice}") from error
    version = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    if not VERSIONS[0] <= version < VERSIONS[1]:
        raise ImportError(f"sluice.hf does not support transformers {transformers.__version__}: {advice}")
    try:
        found = {name: getattr(import_module(module), name) for module, names in _NAMES.items() for name in names}
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"transformers {transformers.__version__} lacks a function that sluice.hf uses: {advice}"
        ) from error
    return SimpleNamespace(transformers=transformers, **found)


def bitsandbytes_operations() -> tuple[Any, Any]:
    """Import, with bitsandbytes, the operations that make weights of saved ones in 4 and in 8 bits."""
    from transformers.integrations.bitsandbytes import Bnb4bitDeserialize, Bnb8bitDeserialize

    return Bnb4bitDeserialize, Bnb8bitDeserialize
