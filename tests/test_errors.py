"""The exception tree: its shape, its messages, and pickling of errors."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable

import pytest

from sluice import _errors
from sluice._errors import Alternative, BudgetError, FormatError, ReadError, SluiceError, TruncatedError

#: Exported classes of errors; ``Alternative`` is a record.
CLASSES = [getattr(_errors, name) for name in _errors.__all__ if name != "Alternative"]


def test_the_drawing_is_the_tree() -> None:
    #: The parent of each class in the drawing of the module's docstring, and the built-in class it also is.
    parents: dict[str, tuple[str | None, str | None]] = {}
    path: list[str] = []
    for line in (_errors.__doc__ or "").splitlines():
        found = re.fullmatch(r"    ([│├└─ ]*)(\w+Error)\b.*?(?:\(also an? (\w+)\))?", line)
        if found:
            depth = len(found[1]) // 4
            path[depth:] = [found[2]]
            parents[found[2]] = (path[depth - 1] if depth else None, found[3])
    assert parents.pop("SluiceError") == (None, None)
    assert sorted(parents) == sorted({kind.__name__ for kind in CLASSES} - {"SluiceError"})
    for name, (parent, also) in parents.items():
        first, *others = getattr(_errors, name).__bases__
        assert first is getattr(_errors, str(parent))
        assert [base.__name__ for base in others if base.__module__ == "builtins"] == ([also] if also else [])


def test_every_exception_of_the_module_is_public() -> None:
    defined = {value for value in vars(_errors).values() if isinstance(value, type) and issubclass(value, Exception)}
    assert defined == set(CLASSES)


@pytest.mark.parametrize("kind", [kind for kind in CLASSES if kind is not SluiceError])
def test_every_class_has_one_advice(kind: type[SluiceError]) -> None:
    assert "advice" in vars(kind)
    assert re.fullmatch(r"[A-Zs].*\.", kind.advice)
    assert str(kind("it went wrong")) == f"it went wrong. {kind.advice}"


def test_a_message_names_everything_that_is_known() -> None:
    error = FormatError("sizes differ", file="x.pth", tensor="a.w", offset=17, expected="4 bytes", found=3)
    assert str(error) == f"x.pth, tensor 'a.w', byte 17: sizes differ; expected 4 bytes; found 3. {FormatError.advice}"
    assert (error.file, error.tensor, error.offset) == ("x.pth", "a.w", 17)
    assert (error.problem, error.expected, error.found) == ("sizes differ", "4 bytes", 3)
    error.file = "other.pth"  # a field may be filled in later
    assert str(error).startswith("other.pth, tensor 'a.w', byte 17: ")
    text = str(TruncatedError("cut", file="", tensor="", offset=0, expected=0, found=""))
    assert text.startswith(", tensor '', byte 0: cut; expected 0; found . ")
    assert len(str(FormatError("odd", tensor="w" * 1_000_000))) < 2200  # a hostile name


def through_pickle(error: SluiceError) -> SluiceError:
    again = pickle.loads(pickle.dumps(error))
    assert isinstance(again, SluiceError)
    return again


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("carry", [through_pickle, copy.copy, copy.deepcopy])
def test_errors_survive_pickling_and_copying(
    kind: type[SluiceError], carry: Callable[[SluiceError], SluiceError]
) -> None:
    error = kind("wrong", file="x.pth", tensor="w")
    error.offset, error.expected, error.found = 3, [1], (2,)
    if isinstance(error, ReadError):
        error.errno, error.strerror = 5, "Input/output error"
    if isinstance(error, BudgetError):
        error.alternatives = (Alternative(change="place='map'", arguments={"place": "map"}, needs={"host": 4}),)
    again = carry(error)
    assert type(again) is kind
    assert str(again) == str(error)
    assert vars(again) == vars(error)
    if isinstance(error, OSError) and isinstance(again, OSError):
        assert (again.errno, again.strerror) == (error.errno, error.strerror)
        assert error.errno is not None
        assert again.filename == "x.pth"
