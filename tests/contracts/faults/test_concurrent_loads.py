"""Concurrent loads: in threads, of one open checkpoint, of one file, and across a fork."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import sluice
from support.wide_tensors import COUNT, module, tensors


def assert_loaded(found: dict[str, torch.Tensor]) -> None:
    for name, tensor in tensors().items():
        assert torch.equal(found[name].detach(), tensor.to(found[name].dtype)), name


def test_loads_in_threads(file: Path) -> None:
    dtypes = [None, torch.bfloat16, torch.float64, None]
    with ThreadPoolExecutor(3) as pool:
        for found in pool.map(lambda dtype: sluice.load_state_dict(file, dtype=dtype), dtypes):
            assert_loaded(found)


def test_one_open_checkpoint_in_threads(file: Path) -> None:
    with sluice.open(file) as checkpoint, ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda _: sluice.load_state_dict(checkpoint), range(5)):
            assert_loaded(found)
        names = [f"w{number % COUNT}" for number in range(12)]
        for name, tensor in zip(names, pool.map(lambda name: checkpoint[name].read(), names), strict=True):
            assert torch.equal(tensor, tensors()[name])


def test_two_modules_in_threads_and_one_module_twice(file: Path) -> None:
    models = [module(live=False) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda model: sluice.load_into(model, file), models))
    sluice.load_into(models[0], file)
    for model in models:
        assert_loaded(dict(model.items()))


def _wait(child: int) -> int:
    """Return the exit code of a child."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform has no fork")
quiet = pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # forking with threads is tested


@forks
@quiet
def test_a_fork_during_a_load_that_loads_itself(file: Path) -> None:
    children: list[int] = []

    def fork(_: sluice.ProgressEvent) -> None:
        if len(children) < 2:
            child = os.fork()
            if child == 0:
                try:
                    torch.set_num_threads(1)  # a comparison would wait for threads that only the parent has
                    assert_loaded(sluice.load_state_dict(file))
                    os._exit(0)
                finally:
                    os._exit(1)
            children.append(child)

    assert_loaded(sluice.load_state_dict(file, progress=fork))
    assert [_wait(child) for child in children] == [0, 0]


@forks
@quiet
def test_a_child_that_continues_its_parents_load_gets_an_error(file: Path) -> None:
    parent = os.getpid()
    children: list[int] = []

    def fork(_: sluice.ProgressEvent) -> None:
        if not children:
            children.append(os.fork())

    try:
        found = sluice.load_state_dict(file, progress=fork)
    except sluice.ReadError as error:
        assert os.getpid() != parent
        os._exit(0 if "forked" in str(error) else 1)
    except BaseException:
        if os.getpid() != parent:
            os._exit(2)
        raise
    if os.getpid() != parent:
        os._exit(3)
    assert_loaded(found)
    assert _wait(children[0]) == 0
