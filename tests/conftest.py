"""Fixtures and settings of every test: Hypothesis profiles, a check for leaks, and the skipping of GPU tests."""

from __future__ import annotations

import gc
import multiprocessing.util
import os
import tempfile
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

from support.fresh_process import SUBPROCESS, serving
from support.leaks import Holdings
from support.ranks import Ranks

if TYPE_CHECKING:
    from support.simulated_device import Simulator

# Set before torch is imported: waiting threads of OpenMP sleep. By default they spin, and on two cores that several
# processes share they take more time than the tests.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# The same examples in every CI run; more and new ones in the long run. No deadlines: shared machines are slow at times.
settings.register_profile("ci", deadline=None, max_examples=100, derandomize=True)
settings.register_profile("long", deadline=None, max_examples=2000)
settings.load_profile("ci")


@pytest.fixture(scope="session", autouse=True)
def _own_temporary_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Give this process a temporary directory of its own, so that each file in it comes from its tests."""
    multiprocessing.util.get_temp_dir()  # removed as the process ends, when pytest has removed its own
    with pytest.MonkeyPatch.context() as patch:
        directory = str(tmp_path_factory.mktemp("temporary"))
        patch.setenv("TMPDIR", directory)
        # The servers of tests are on this machine: a proxy of the environment cannot reach them.
        patch.setenv("no_proxy", "127.0.0.1,localhost,::1")
        patch.setattr(tempfile, "tempdir", directory)
        # torch makes this directory when an optimizer is first built; named here, it does not count as a leak.
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        yield


@pytest.fixture(scope="session", autouse=True)
def _registered_devices(request: pytest.FixtureRequest) -> None:
    """Register the simulated devices before any backward pass: torch counts devices in the first one of a process."""
    if any(item.get_closest_marker("gpu") for item in request.session.items):
        import torch

        from support.simulated_device import prepare, reason_against

        if not torch.cuda.is_available() and not reason_against():
            prepare()


@pytest.fixture(autouse=True)
def _no_leaks() -> Iterator[None]:
    """Fail a test that leaves descriptors, threads or temporary files behind."""
    before = Holdings.now()
    yield
    left = before.left_behind()
    assert not left, "the test left behind:\n" + "\n".join(left)


@pytest.fixture(scope="session")
def fresh_processes() -> Iterator[None]:
    """Keep the server of ``support.fresh_process.run``, from the first test that needs it on."""
    with serving():
        yield


@pytest.fixture
def forked_processes(fresh_processes: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the measured processes of ``sluice.benchmark`` from one that has imported torch."""
    monkeypatch.setattr("sluice.benchmark.process.subprocess", SUBPROCESS)


@pytest.fixture
def filesystem() -> Iterator[Any]:
    """Return the file system of fsspec in memory, empty before and after."""
    import fsspec

    memory = fsspec.filesystem("memory")
    memory.store.clear()
    memory.pseudo_dirs[:] = [""]
    yield memory
    memory.store.clear()
    memory.pseudo_dirs[:] = [""]


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Ranks]:
    """Return a process group of two, which is kept for the session."""
    with Ranks(2) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[Ranks]:
    """Return a process group of four, which is kept for the session."""
    with Ranks(4) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def transformers() -> Any:
    """Return transformers without progress bars and threads; tests are skipped if it is not installed."""
    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"
    found = pytest.importorskip("transformers", reason="transformers is not installed: pip install 'sluice[hf]'")
    found.logging.set_verbosity_error()
    found.utils.logging.disable_progress_bar()
    return found


@pytest.fixture(scope="session")
def context() -> Iterator[None]:
    """Create the context of every accelerator, so that it does not count as growth of a test."""
    import torch

    from support.simulated_device import prepare

    if not torch.cuda.is_available():
        prepare()
    for number in range(torch.cuda.device_count()):
        torch.ones(1, device=f"cuda:{number}").add_(1).item()
    gc.freeze()  # each test collects garbage twice, which takes a quarter of a second with all modules in it
    yield
    gc.unfreeze()


@pytest.fixture
def simulator(context: None) -> Iterator[Simulator | None]:
    """Plug the simulated devices in for a test and check that it made no fault; None if there is a GPU."""
    import torch

    from support.simulated_device import plugged_in

    if torch.cuda.is_available():
        yield None
        return
    with plugged_in() as simulated:
        yield simulated
        assert not simulated.take_faults()


@pytest.fixture
def device(simulator: Simulator | None) -> Iterator[str]:
    """Yield the first accelerator with an empty allocator cache; remove its memory limit after the test."""
    import torch

    from sluice.engine.accelerators import accelerators

    _free()
    yield accelerators()[0]
    torch.get_device_module().set_per_process_memory_fraction(1.0, 0)
    _free()


@pytest.fixture
def second_device(device: str) -> str:
    """Return the second accelerator, or skip."""
    from sluice.engine.accelerators import accelerators

    names = accelerators()
    return names[1] if len(names) > 1 else pytest.skip("needs two devices")


def _free() -> None:
    import torch

    gc.collect()
    torch.accelerator.synchronize()
    torch.get_device_module().empty_cache()
    torch.get_device_module().reset_peak_memory_stats()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that need a process group."""
    for item in items:
        if {"two_ranks", "four_ranks"}.intersection(getattr(item, "fixturenames", ())):
            item.add_marker("ranks")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests that need an accelerator if there is none and none can be simulated, with both reasons."""
    if item.get_closest_marker("gpu") is None:
        return
    import torch

    from support.simulated_device import reason_against

    if not torch.accelerator.is_available() and (reason := reason_against()):
        pytest.skip(f"torch {torch.__version__} finds no accelerator on this machine, and {reason}")
