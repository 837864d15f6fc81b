"""The memory contract for the ways to fill a module that ``test_growth`` does not measure, in a fresh process."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from support import fresh_process

pytestmark = pytest.mark.usefixtures("fresh_processes")

CASES = """
import gc, sys, warnings, torch, sluice
from torch import nn
from sluice.testing import assert_peak
from support.module_zoo import Extra, Renaming

MIB = 1 << 20
SIDE = 3520
LARGE = SIDE * SIDE * 4
path = sys.argv[1]
memory = sluice.MemoryLimits(staging="4MiB")
warnings.simplefilter("ignore")


def check(name, model, state, finished, **options):
    file = path + ".plain" if state is PLAIN else path
    if state is not PLAIN:
        torch.save(state, file)
        state.clear()
    gc.collect()
    with assert_peak(finished + (4 + 32) * MIB):
        sluice.load_into(model, file, memory=memory, **options)
    assert not any(t.is_meta for t in (*model.parameters(), *model.buffers())), name
    print(name)


def empty(build):
    with sluice.empty_init():
        return build()


def large():
    return nn.Linear(SIDE, SIDE, bias=False)


def weight(dtype=torch.float32):
    return torch.ones(SIDE, SIDE, dtype=dtype)


PLAIN = {"weight": weight()}  # written once
torch.save(PLAIN, path + ".plain")
PLAIN.clear()


class Tied(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.a = nn.Parameter(torch.empty(shape))
        self.b = self.a


class Aliased(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = large()
        self.b = large()
        self.b.weight = nn.Parameter(self.a.weight.data)


check("warm", empty(lambda: nn.Linear(8, 8)), dict(nn.Linear(8, 8).state_dict()), 0)
check("tied", empty(lambda: Tied((SIDE, SIDE))), {"a": weight(), "b": weight()}, LARGE)
check("tied, one row", empty(lambda: Tied((1, SIDE * SIDE))), {k: weight().view(1, -1) for k in "ab"}, LARGE)
check("tied, transposed", empty(lambda: Tied((SIDE, SIDE))), {"a": weight().t(), "b": weight()}, LARGE)
check("aliased", empty(Aliased), {"a.weight": weight()}, LARGE)
check("renaming", empty(lambda: Renaming(SIDE, SIDE, bias=False)), {"kernel": weight()}, LARGE)
check("lazy", nn.LazyLinear(SIDE, bias=False), PLAIN, LARGE)
extra = Extra()
extra.extra = {"table": weight()}
state = dict(extra.state_dict())
extra.extra = None
check("extra state", empty(Extra), state, LARGE)
check("recurrent", empty(lambda: nn.LSTM(2048, 2048)), dict(nn.LSTM(2048, 2048).state_dict()), 2 * 2048 * 8192 * 4)

check("live, from half", large(), {"weight": weight(torch.bfloat16)}, 0)
check("live, to half", large(), PLAIN, LARGE // 2, dtype=torch.bfloat16)
model = large()
model.weight.data = model.weight.data.t()
check("live, transposed", model, PLAIN, 0)
model.weight.data = torch.zeros(SIDE, 2 * SIDE)[:, ::2]
check("live, with gaps", model, PLAIN, 0)
with torch.inference_mode():
    model = large()
check("live, inference", model, PLAIN, 0)
check("live, frozen", large().requires_grad_(False), PLAIN, 0)
for dtype, final in ((None, LARGE), (torch.bfloat16, LARGE // 2)):
    check("initialised", empty(lambda: nn.Sequential(large(), nn.Linear(2, 2))), dict(
        (f"1.{k}", v) for k, v in nn.Linear(2, 2).state_dict().items()), final, strict=False, dtype=dtype)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the peak is the kernel's own record")
def test_every_other_way_to_fill_a_module_keeps_the_memory_contract(tmp_path: Path) -> None:
    done = fresh_process.run(CASES, tmp_path / "f.pth")
    assert done.returncode == 0, done.stdout.splitlines()[-1:] + done.stderr.splitlines()[-8:]
