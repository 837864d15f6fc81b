"""torch creates its compiler's cache directory before the leak check of a test begins."""

from __future__ import annotations

from support.compiler_cache import _imported_compiler

__all__ = ["_imported_compiler"]
