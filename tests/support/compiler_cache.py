"""A fixture for tests that build modules under ``empty_init``."""

from __future__ import annotations

import importlib

import pytest


@pytest.fixture(scope="module", autouse=True)
def _imported_compiler() -> None:
    """Let torch create its cache directory before a test starts: some meta kernels import its compiler."""
    importlib.import_module("torch._inductor.runtime.cache_dir_utils").cache_dir()
