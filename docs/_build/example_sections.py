"""Lets the reference show ``Example:`` in a docstring as code; griffe knows the plural only."""

from __future__ import annotations

import re
from typing import Any

import griffe

__all__ = ["ExampleSections"]


class ExampleSections(griffe.Extension):
    """Reads ``Example:`` as ``Examples:``."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change the docstring of every object as it is found."""
        if obj.docstring:
            obj.docstring.value = re.sub(r"^( *)Example:$", r"\1Examples:", obj.docstring.value, flags=re.MULTILINE)
