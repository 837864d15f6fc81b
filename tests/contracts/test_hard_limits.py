"""Hard limits: memory control groups and virtual memory; each in a fresh process."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from sluice.testing import memory_limit_refusal, run_limited
from support import fresh_process

pytestmark = [
    pytest.mark.usefixtures("fresh_processes"),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits and their effects are Linux's"),
    pytest.mark.timeout(600),  # each test is several processes, which import torch
]

MIB = 1 << 20


def write(path: Path, shapes: list[tuple[int, ...]]) -> Path:
    torch.save({str(i): torch.full(shape, float(i)) for i, shape in enumerate(shapes)}, path)
    return path


#: Does everything but the load, or one kind of load. Builds the model itself, as a user's program does.
PROGRAM = """
import json, sys, torch, sluice

method, path, options = json.loads(sys.argv[1])

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        for number in range(12):
            self.register_parameter(str(number), torch.nn.Parameter(torch.zeros(2048, 4096)))

if method == "sluice":
    with sluice.empty_init():
        model = Net()
    def read():
        with open("/proc/self/io") as file:
            return int(file.readline().split()[1])

    sluice.load_into, sluice.BudgetError  # imports
    before = read()
    try:
        sluice.load_into(model, path, **options)
    except sluice.BudgetError:
        assert all(weight.is_meta for weight in model.parameters()) and read() - before < 1 << 20
        raise
elif method == "naive":
    model = Net().to(getattr(torch, options.get("dtype", "float32")))
    model.load_state_dict(torch.load(path, weights_only=True))
else:
    sluice.empty_init, sluice.load_into  # the interpreter and its imports alone
    with torch.device("meta"):
        model = Net()
if method != "nothing":
    assert all(bool((weight.detach()[-1] == float(name)).all()) for name, weight in model.named_parameters())
"""

#: F of the program's model in fp32.
FINAL = 12 * 2048 * 4096 * 4


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of 384 MiB: larger than measurement error, and large enough for direct reads."""
    return write(tmp_path_factory.mktemp("limits") / "large.pth", [(2048, 4096)] * 12)


@pytest.fixture(scope="module")
def interpreter(large: Path) -> int:
    """Bytes that the interpreter and its imports take, counted by a control group."""
    if reason := memory_limit_refusal():
        pytest.skip(reason)
    done = run_limited(program("nothing", large), 4096 * MIB)
    assert done.returncode == 0, done.stderr
    assert done.peak_bytes is not None
    return done.peak_bytes


def program(method: str, path: Path, **options: Any) -> list[str]:
    return [sys.executable, "-c", PROGRAM, json.dumps([method, str(path), options])]


OPTIONS = [
    {"dtype": "bfloat16", "page_cache": "bypass"},
    pytest.param({}, marks=pytest.mark.long),
    pytest.param({"page_cache": "bypass"}, marks=pytest.mark.long),
    pytest.param({"page_cache": "keep"}, marks=pytest.mark.long),
    pytest.param({"dtype": "bfloat16"}, marks=pytest.mark.long),
    pytest.param({"dtype": "bfloat16", "page_cache": "keep"}, marks=pytest.mark.long),
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_load_completes_in_a_control_group_where_the_naive_ways_are_killed(
    large: Path, interpreter: int, options: dict[str, Any]
) -> None:
    """The limit is what the contract allows and the interpreter; page cache counts in the group as well."""
    final = FINAL // 2 if "dtype" in options else FINAL
    limit = final + (64 + 32) * MIB + 12 * (2048 + 8192) + interpreter
    done = run_limited(program("sluice", large, **options), limit)
    assert (done.returncode, done.oom_killed) == (0, False), done.stderr
    assert done.peak_bytes is not None
    assert final <= done.peak_bytes <= limit
    dtype = {name: value for name, value in options.items() if name == "dtype"}
    killed = run_limited(program("naive", large, **dtype), limit)
    assert killed.oom_killed, killed
    assert killed.returncode < 0


#: Runs a model of 384 MiB from its file. Layer n has the number n in its weight, which it checks.
STREAM = """
import sys, torch, sluice

class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(2048, 4096), requires_grad=False)

    def forward(self, x):
        return x @ self.weight.T / 4096

model = torch.nn.Module()
with sluice.empty_init():
    model.layers = layers = torch.nn.ModuleList(Layer() for _ in range(12))
renamed = {str(number): f"layers.{number}.weight" for number in range(12)}
memory = 192 << 20
with torch.inference_mode(), sluice.stream(model, sys.argv[1], rename=renamed, memory=memory) as stream:
    for _ in range(2):
        for number, layer in enumerate(layers):
            assert layer(torch.ones(4096)).eq(number).all(), number
assert stream.report.read_bytes >= 2 * 200 << 20
"""


def test_a_stream_runs_a_model_in_half_of_its_memory(large: Path, interpreter: int) -> None:
    limit = FINAL // 2 + (64 + 32) * MIB + interpreter
    done = run_limited([sys.executable, "-c", STREAM, str(large)], limit)
    assert (done.returncode, done.oom_killed) == (0, False), done.stderr
    assert done.peak_bytes is not None
    assert done.peak_bytes <= limit


@pytest.mark.parametrize("room", [FINAL, pytest.param(FINAL // 2, marks=pytest.mark.long)])
def test_a_load_that_does_not_fit_its_control_group_is_refused_and_not_killed(
    large: Path, interpreter: int, room: int
) -> None:
    """Room for the weights alone is less than the load needs: it is refused before it reads any of them."""
    done = run_limited(program("sluice", large), room + interpreter)
    assert (done.returncode, done.oom_killed) == (1, False)
    assert "BudgetError" in done.stderr
    assert "left in the control group" in done.stderr
    assert "place='map'" in done.stderr


#: Sets a limit on virtual memory above the process's current size, loads, and prints the outcome.
VIRTUAL = """
import json, os, resource, sys, torch, sluice

path, room, options = json.loads(sys.argv[1])
load_into, BudgetError, MemoryLimits = sluice.load_into, sluice.BudgetError, sluice.MemoryLimits
outcomes = []
for mib in room:
    with torch.device("meta"):
        model = torch.nn.ParameterDict({str(i): torch.nn.Parameter(torch.empty(2048, 1024)) for i in range(12)})
    with open("/proc/self/statm") as file:
        size = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (size + (mib << 20), resource.RLIM_INFINITY))
    try:
        load_into(model, path, **options)
    except BudgetError as error:
        outcomes.append("ulimit -v" in str(error) and bool(model["0"].is_meta))
    else:
        assert bool((model["11"].detach()[-1] == 11).all())
        outcomes.append("loaded")
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
print(json.dumps(outcomes))
"""


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"dtype": "bfloat16"}, marks=pytest.mark.long),
        pytest.param({"page_cache": "bypass"}, marks=pytest.mark.long),
        pytest.param({"place": "map"}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_a_limit_on_virtual_memory_is_found_and_ends_in_success_or_a_budget_error(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    room = [16, 64, 100, 120, 140, 160, 180, 200, 230, 260, 300, 400, 600, 1000]
    path = write(tmp_path / "f.pth", [(2048, 1024)] * 12)
    done = fresh_process.run(VIRTUAL, json.dumps([str(path), room, options]))
    assert done.returncode == 0, done.stderr
    outcomes = json.loads(done.stdout)
    # Loads are refused with the model untouched below some size, and all succeed above it: neither threads started
    # before planning nor leftovers of earlier loads use memory under the limit.
    refused = outcomes.count(True)
    assert 0 < refused < len(room)
    assert outcomes == [True] * refused + ["loaded"] * (len(room) - refused)
