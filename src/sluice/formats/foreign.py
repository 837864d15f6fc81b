"""Files that are passed by mistake, recognized by their first bytes or by names in a zip archive, with advice.

Nothing here decides whether sluice reads a file: these patterns are tried after every format has declined, so that a
wrong guess costs only a misleading message. Marks that are too short or too common to be reliable are left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from sluice._errors import CheckpointError, FormatError, IncompleteCheckpointError, UnsupportedError
from sluice._messages import first_names

__all__ = ["HEAD_BYTES", "HINTING_NAME", "directory_hint", "recognise", "recognise_archive", "recognise_placeholder"]

#: Bytes of the head that is examined: a tar header has 512, and JSON names its kind early.
HEAD_BYTES = 4096

#: Most characters of a text that a message shows.
_SHOWN_CHARACTERS = 80

_UNPACK = "Unpack it, and open the checkpoint inside."
_UNPICKLE = "If you trust it, load it with {} and save its tensors with torch.save."
_AGAIN = "Download it again, or copy it again from a complete file."
_GET = "Get the file itself: {}."


class _Kind(NamedTuple):
    """A kind of file that sluice recognizes but does not read."""

    #: Pattern of its first bytes, compiled when a file is not recognized.
    start: bytes
    #: Class of the error.
    error: type[CheckpointError]
    #: Text of the error.
    problem: str
    #: Advice; empty for the advice of the error class.
    advice: str = ""
    #: Whether it was a checkpoint and was damaged or not completed.
    damaged: bool = False


def _unread(start: bytes, what: str, advice: str = "") -> _Kind:
    return _Kind(start, UnsupportedError, f"this is {what}, which sluice does not read", advice)


def _pointer(start: bytes, what: str, how: str) -> _Kind:
    return _Kind(start, IncompleteCheckpointError, f"this is {what} in place of the file", _GET.format(how))


#: Eight bytes that can be the length of a header, and the start of JSON that is not an object, or not at once.
_ODD_HEADER = rb"(?!\x00{8}).{4}\x00{4}(?:\xef\xbb\xbf|\xff\xfe|\xfe\xff|[\x20\t\n\r]++|(?=[\[{\"n]))[\x00]?[\[{\"n]"

#: Placeholders of any file, a checkpoint or an index.
_PLACEHOLDERS = (
    _pointer(
        rb"version https?://(?:git-lfs\.github\.com|git-media\.io|hawser)",
        "a git-lfs pointer",
        "run 'git lfs pull' in its repository, or download it from there",
    ),
    _pointer(
        rb"# xet version|\.?[./]*/annex/objects/|(?:md5: [0-9a-f]{32}|wdir: [^\n]*)?\s*outs:\s*\n- ",
        "a pointer of git-xet, git-annex or DVC",
        "pull it with that program in its repository",
    ),
    _Kind(
        rb"(?:\xef\xbb\xbf)?\s*(?:<!--.{0,2000}?-->\s*)?(?i:<!doctype|<html|<head|<body|<\?xml|<error>)",
        FormatError,
        "this is a web page in place of the file",
        "The address is wrong, or it requires a login or the acceptance of a license: download the file itself.",
    ),
    _Kind(
        rb'\s*\{\s*"(?:error|message|detail|code|status)"',
        FormatError,
        "this is the response of a server in place of the file",
        "The address is wrong, or it requires a login: download the file itself.",
    ),
)

_KINDS = (
    _unread(
        rb"\x89HDF\r\n\x1a\n", "an HDF5 file", "Load it with Keras or h5py, and save its tensors with safetensors."
    ),
    _unread(rb"\x93NUMPY", "a numpy .npy file", "Load it with numpy, and save it with safetensors.numpy.save_file."),
    _unread(
        rb"\x1f\x8b",
        "a gzip-compressed file",
        "Unpack it: gunzip -c FILE > FILE.tar; a tar is read in place.",
    ),
    _unread(
        rb"\x28\xb5\x2f\xfd|BZh[1-9]1AY&SY|\xfd7zXZ\x00|\x04\x22\x4d\x18|7z\xbc\xaf\x27\x1c|Rar!\x1a\x07",
        "a compressed file or archive (zstd, bzip2, xz, lz4, 7z, rar)",
        _UNPACK,
    ),
    _Kind(rb"PK\x05\x06", FormatError, "this is an empty zip archive", CheckpointError.advice),
    # The number of bytes of the magic number, 10, is a line feed.
    _Kind(
        rb"\x80[\x02\x03]\x8a\r\nl\xfc",
        FormatError,
        "this is a legacy torch.save file with converted line breaks: it was transferred as text",
        "Transfer it again, in binary mode.",
        damaged=True,
    ),
    _unread(
        rb"\x80[\x02-\x05]|\(dp\d+\n|\(lp\d+\n|[}\]]q\x00",
        "a bare pickle, not written by torch.save",
        _UNPICKLE.format("the library that wrote it (pickle, joblib)"),
    ),
    _Kind(
        rb'\s*\{.*"weight_map"',
        UnsupportedError,
        "this is the index of a sharded checkpoint, read as if it were a checkpoint itself",
        "Pass its path, under a name that ends in .index.json, next to its shards.",
    ),
    _unread(rb"\s*[{\[]\s*[\"{\[\]}\d-]", "JSON text", "Look next to it for the weights that it describes."),
    _Kind(
        rb"\x00{64}|\x00+\Z",
        IncompleteCheckpointError,
        "the file starts with zeros: its download or copy was never completed",
        _AGAIN,
        damaged=True,
    ),
    # Field 1 of ModelProto is the version, then comes a producer, a domain, a graph or an operator set.
    _unread(
        rb"\x08[\x03-\x1f](?:\x12[\x00-\x40][\x20-\x7e]*|\x1a|\x22|\x3a|\x42)"
        rb"|\x08\x01\x12[\x80-\xff]|.{4}TFL3|ftrt|lmgg|tjgg|fmgg|algg",
        "a model for another runtime (ONNX, TensorFlow, TensorRT, GGML)",
        "Get the weights from the framework that wrote it, as a state dict.",
    ),
    _unread(
        rb"(?:[\x81-\x8f]|\xde..|\xdf.{4})\xa6params",
        "a Flax msgpack file",
        "Load it with Flax, or with transformers (from_flax=True), and save it as safetensors.",
    ),
    _unread(rb"PAR1|ARROW1", "a Parquet or Arrow table, a format of data sets"),
    _Kind(
        _ODD_HEADER,
        FormatError,
        "this looks like safetensors, but its header is not a JSON object in UTF-8 that starts at byte 8",
        damaged=True,
    ),
)

#: Text in any script, without control characters other than white space.
_TEXT = re.compile(r"[^\x00-\x08\x0e-\x1f\x7f]+")


def recognise_placeholder(data: bytes, file: str) -> CheckpointError | None:
    """Return the error for the placeholder of a file that was not downloaded, or None; see ``recognise``."""
    return _first(_PLACEHOLDERS, data[:HEAD_BYTES], file)


def _first(kinds: Iterable[_Kind], head: bytes, file: str) -> CheckpointError | None:
    """Return the error for a file with this head of one of the kinds, or None."""
    for kind in kinds:
        if re.match(kind.start, head, re.DOTALL):
            error = kind.error(kind.problem, file=file, advice=kind.advice or None)
            error.foreign = not kind.damaged
            return error
    return None


def recognise(head: bytes, file: str) -> CheckpointError | None:
    """Return the error for a file of a known kind that is not a checkpoint, or None.

    Args:
        head: Its first bytes, up to 4096.
        file: Its path, for the message.
    """
    text, error = _text(head), _first((*_PLACEHOLDERS, *_KINDS), head, file)
    if text is None or error is not None:
        return error
    line = text.strip()[:_SHOWN_CHARACTERS]
    return _foreign("this is text, not a checkpoint", file, repr(line), CheckpointError.advice)


def _foreign(problem: str, file: str, found: str, advice: str) -> FormatError:
    error = FormatError(problem, file=file, found=found, advice=advice)
    error.foreign = True
    return error


def _text(head: bytes) -> str | None:
    try:
        text = head.decode()
    except UnicodeDecodeError as error:
        if error.start < len(head) - 3:  # else the last character is cut off
            return None
        text = head[: error.start].decode()
    return text if _TEXT.fullmatch(text) else None


#: Zip archives of other writers: the pattern of a name in them, what they are, and advice.
_ARCHIVES = (
    (
        r"serialized_exported_program\.json",
        "an exported program of torch before 2.8 (torch.export.save)",
        "Load it with torch.export.load, and save its state_dict with torch.save.",
    ),
    (
        r"[^/]*/\.data/extern_modules",
        "a package of torch.package",
        "If you trust it, import it with torch.package, and save the state dict of the model inside.",
    ),
    (
        r".*\.npy",
        "a numpy .npz archive",
        "Load it with numpy, and save its arrays with safetensors.numpy.save_file.",
    ),
    (r"(?:.*/)?model\.weights\.h5", "a Keras model", "Load it with Keras, and save its weights with safetensors."),
)


def recognise_archive(names: Sequence[str], file: str) -> CheckpointError | None:
    """Return the error for a zip archive that torch.save did not write, or None if it may have.

    Args:
        names: The names of its first members, verbatim.
        file: Its path, for the message.
    """
    last = {name.rpartition("/")[2] for name in names}
    below = {name.partition("/")[2] for name in names}
    if not names or {"data.pkl", "archive_format"} & below:
        return None
    for pattern, what, advice in _ARCHIVES:
        if any(re.fullmatch(pattern, name, re.DOTALL) for name in names):
            return UnsupportedError(f"this is {what}, which sluice does not read", file=file, advice=advice)
    if "data.pkl" in last:
        problem = "the records of this torch.save file are not below exactly one directory: it was packed again"
        found = next(name for name in names if name.endswith("data.pkl"))
        advice = "Unpack it, and pack the directory of data.pkl: zip -0 -r."
        return FormatError(problem, file=file, expected="DIRECTORY/data.pkl", found=repr(found), advice=advice)
    problem = "this zip archive was not written by torch.save: it has no data.pkl"
    inside = any(name.endswith((".bin", ".pt", ".pth", ".ckpt", ".safetensors", ".distcp")) for name in last)
    found = first_names(list(map(repr, names)))
    return _foreign(problem, file, found, _UNPACK if inside else CheckpointError.advice)


#: Patterns of names of files and directories, each with the class of an error and advice, in which ``{}`` is the name;
#: the first match decides.
_HINTS: tuple[tuple[str, type[CheckpointError], str], ...] = (
    (
        r".+\.(?:incomplete|part|crdownload|aria2)",
        IncompleteCheckpointError,
        "The download of {} was never completed: resume it.",
    ),
    (r"snapshots", FormatError, "It is the cache of a model: pass a directory in {} instead."),
    (r"model_index\.json", FormatError, "{} belongs to a pipeline of models: pass the directory of one, such as unet."),
    (
        r"(?:checkpoint|epoch|step|global_step|iter)[-_]?\d+",
        FormatError,
        "Pass the path of one of its checkpoints instead, such as {}.",
    ),
    (r"data\.pkl", FormatError, "{} belongs to an unpacked torch.save file: pack its directory with zip -0 -r."),
    (r".+\.(?:pth|ckpt|pt|bin|tar|nemo|gguf)", FormatError, "Pass the path of a file instead, such as {}."),
    (
        r".+\.(?:onnx|h5|keras|msgpack|pb|tflite|npz|ot)",
        UnsupportedError,
        "sluice does not read {}: convert it with the library that wrote it.",
    ),
)

#: Names that match a hint.
HINTING_NAME = re.compile("|".join(pattern for pattern, *_ in _HINTS))


def directory_hint(names: Sequence[str]) -> tuple[type[CheckpointError], str]:
    """Return the error for a directory that holds no recognized checkpoint, and advice from the names in it."""
    for pattern, error, advice in _HINTS:
        for name in sorted(names):
            if re.fullmatch(pattern, name):
                return error, advice.format(repr(name))
    return FormatError, "Pass the path of a checkpoint file, or of the directory that holds its files."
