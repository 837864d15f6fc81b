"""Build the sdist, a wheel from it, install that into a bare environment and use it: ``python tools/check_package.py``.

The environment has the dependencies of the one that runs this file, CPU torch among them, but not its sluice.
"""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]

#: Files of the wheel that are not modules.
_ASSETS = ("sluice/py.typed", "licenses/LICENSE", "licenses/src/sluice/benchmark/assets/uPlot.LICENSE")

_USE = """
import sluice, torch
model = torch.nn.Linear(3, 2)
sluice.save(model, "model.safetensors")
other = torch.nn.Linear(3, 2)
sluice.load_into(other, "model.safetensors")
assert torch.equal(other.weight, model.weight)
print(sluice.__file__)
"""


def main() -> int:
    """Run the checks; return 1 if the wheel lacks something or has too much."""
    with tempfile.TemporaryDirectory(prefix="sluice-package-") as name:
        folder = Path(name)
        _run(sys.executable, "-m", "venv", folder / "venv")
        python = folder / "venv" / "bin" / "python"
        _run(python, "-m", "pip", "install", "--quiet", "hatchling>=1.27")
        _run(python, "-m", "hatchling", "build", "-t", "sdist", "-d", folder, cwd=ROOT)
        with tarfile.open(next(folder.glob("*.tar.gz"))) as sdist:
            sdist.extractall(folder / "source", filter="data")
        [source] = (folder / "source").iterdir()
        _run(python, "-m", "hatchling", "build", "-t", "wheel", "-d", folder, cwd=source)
        wheel = next(folder.glob("*.whl"))
        problems = _problems(zipfile.ZipFile(wheel).namelist())
        _run(python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", wheel)
        [packages] = (folder / "venv" / "lib").glob("python*/site-packages")
        (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
        found = _run(python, "-I", "-c", _USE, cwd=folder)
        if not Path(found.strip()).is_relative_to(packages):
            problems.append(f"another sluice was imported: {found}")
        shown = _run(folder / "venv" / "bin" / "sluice", "inspect", "model.safetensors", "--json", cwd=folder)
        if len(json.loads(shown)["tensors"]) != 2:
            problems.append("sluice inspect shows other tensors")
        print("\n".join(problems) or f"{wheel.name}: {wheel.stat().st_size >> 10} KiB, built from the sdist, works")
    return int(bool(problems))


def _problems(names: list[str]) -> list[str]:
    """Return what is wrong with the names of a wheel."""
    assets = [path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src" / "sluice").rglob("assets/*")]
    missing = [each for each in (*_ASSETS, *assets) if not any(name.endswith(each) for name in names)]
    others = [name for name in names if not name.startswith(("sluice/", "sluice-"))]
    caches = [name for name in names if "__pycache__" in name or "/tests/" in name]
    return [f"missing: {each}" for each in missing] + [f"does not belong there: {each}" for each in (*others, *caches)]


def _run(*command: str | Path, cwd: Path | None = None) -> str:
    done = subprocess.run([str(part) for part in command], cwd=cwd, check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
