"""Build the environments that ``tools/test_versions.py`` runs the tests in.

An environment has three parts, each a folder of the cache, ``${XDG_CACHE_HOME:-~/.cache}/sluice-versions``:

- ``packages-...``: everything but torch, in the versions of ``constraints.txt`` except for those that are tested;
- ``cuda-...``: the CUDA libraries that ``import torch`` links to, shared by the environments of one torch;
- ``torch-...``: torch itself, with links to the CUDA libraries where its own search paths expect them.

PyPI has only CUDA builds of torch for Linux on x86-64. They run on the CPU, and link to most CUDA libraries when they
are imported, so these are installed. Left out are Triton and what is loaded on first use: cuSOLVER, the engines of
cuDNN, headers and static libraries. That halves the size to 3 GB. ``import torch`` at the end of a build is the test
that enough is left.

Each part is built in a temporary folder and then renamed, so that a build that fails or is stopped leaves nothing that
looks complete, and two builds at once do no harm.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PathDistribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]

#: Seconds for one call of pip. A registry that is slow fails the build, not the tests.
PIP_SECONDS = 600.0
#: Free space below which nothing is built: one torch with its wheels while they are unpacked.
FREE_BYTES = 8 << 30

#: Packages of the group "dev" that the core profile does not use, and names that are not installed from here.
_NOT_INSTALLED = frozenset({"ruff", "mypy", "import-linter", "types-psutil", "ipykernel", "nbclient", "playwright"})
_NOT_INSTALLED |= {"torch", "lightning", "diffusers", "peft"}
#: Packages that require torch, which another part has: they are installed alone, and the others bring the rest.
ABOVE_TORCH = frozenset({"accelerate", "bitsandbytes"})
#: CUDA packages and extras that torch loads on first use, and that it does not use at all on the CPU.
_NOT_LINKED = frozenset({"nvidia-cusolver", "nvidia-nvtx", "cusolver", "nvtx", "cuda-bindings", "triton"})


class BuildError(Exception):
    """An environment cannot be built here; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """Versions that are tested together."""

    #: Short name, an argument of ``tools/test_versions.py``.
    name: str
    #: Python, as "3.11".
    python: str
    #: Exact versions.
    torch: str
    numpy: str
    transformers: str

    @property
    def tag(self) -> str:
        """The tag of the interpreter in names of wheels."""
        return "cp" + self.python.replace(".", "")


def cache_directory() -> Path:
    """Return the folder of all parts."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sluice-versions"


def build(environment: Environment, deadline: float = math.inf) -> tuple[Path, list[Path]]:
    """Build what is not in the cache yet; return the interpreter and the folders of packages, first found first.

    Args:
        environment: What to build.
        deadline: Moment of ``time.monotonic`` at which a build is given up.

    Raises:
        BuildError: There is no such interpreter, or a package cannot be installed in time.
    """
    python = find_interpreter(environment.python)
    torch = cache_directory() / f"torch-{environment.torch}-{environment.tag}"
    if not torch.exists():
        _build_torch(environment, python, torch, deadline)
    requirements = [*package_requirements(environment), *torch_requirements(torch, cuda=False)]
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    packages = cache_directory() / f"packages-{environment.tag}-{_hash([*requirements, pins])}"
    if not packages.exists():
        with _part(packages) as folder:
            above = [each for each in requirements if each in ABOVE_TORCH]
            _pip(python, folder, [each for each in requirements if each not in above], deadline)
            _pip(python, folder, ["--no-deps", *above], deadline)
    return python, [torch, packages]


def find_interpreter(version: str) -> Path:
    """Return an interpreter of this version: on the path, of pyenv, or in ``python-<version>/bin`` of the cache."""
    name = f"python{version}"
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    candidates: list[str | Path | None] = [
        sys.executable,
        shutil.which(name),
        *sorted(pyenv.glob(f"{version}.*/bin/{name}"), reverse=True),
        cache_directory() / f"python-{version}" / "bin" / name,
    ]
    for candidate in candidates:
        # A shim of pyenv is on the path also if its version is not active, and then fails.
        code = "import sys; print('%d.%d' % sys.version_info[:2])"
        if candidate is None:
            continue
        try:
            ran = subprocess.run([candidate, "-c", code], check=False, capture_output=True, text=True, timeout=60)
        except OSError:
            continue
        if ran.stdout.strip() == version:
            return Path(candidate)
    raise BuildError(f"no interpreter {name} on this machine")


def package_requirements(environment: Environment) -> list[str]:
    """Return what to install in addition to torch: the project's dependencies and what its tests import, all pinned."""
    document = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    project, tests = document["project"], document["dependency-groups"]["dev"]
    extras = project["optional-dependencies"]
    named = [Requirement(text) for text in (*project["dependencies"], *tests, *extras["hf"], *extras["hash"])]
    names = [each.name for each in named if canonicalize_name(each.name) not in _NOT_INSTALLED]
    tested = {"numpy": environment.numpy, "transformers": environment.transformers}
    return [f"{name}=={tested[name]}" if name in tested else name for name in names]


def torch_requirements(folder: Path, *, cuda: bool) -> list[str]:
    """Return what an installed torch requires: the CUDA libraries that it links to, or everything else."""
    distribution = PathDistribution(next(folder.glob("torch-*.dist-info")))
    wanted = []
    for requirement in map(Requirement, distribution.requires or []):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        name = canonicalize_name(requirement.name)
        if not _is_linked(name):
            continue
        if name.startswith(("nvidia-", "cuda-")) == cuda:
            requirement.extras = {extra for extra in requirement.extras if _is_linked(extra)}
            requirement.marker = None
            wanted.append(str(requirement))
    return sorted(wanted)


def _is_linked(name: str) -> bool:
    return re.sub(r"-cu\d+$", "", name) not in _NOT_LINKED


def _build_torch(environment: Environment, python: Path, final: Path, deadline: float) -> None:
    with _part(final) as folder:
        _pip(python, folder, ["--no-deps", f"torch=={environment.torch}"], deadline)
        _remove(folder, "torch/include", "torch/lib/*.a", "bin")
        requirements = torch_requirements(folder, cuda=True)
        cuda = cache_directory() / f"cuda-{_hash(requirements)}"
        if requirements and not cuda.exists():
            with _part(cuda) as libraries:
                _pip(python, libraries, requirements, deadline)
                _remove(libraries, "nvidia/cudnn/lib/libcudnn_*", "nvidia/**/include", "nvidia/**/*.a", "bin")
                _remove(libraries, "nvidia/**/*.bc", "*.dist-info")
        for each in cuda.iterdir() if requirements else ():
            (folder / each.name).symlink_to(Path("..") / cuda.name / each.name)


@contextmanager
def _part(final: Path) -> Iterator[Path]:
    """Give a folder next to ``final`` that takes its name at the end; if another build was faster, its result stays."""
    final.parent.mkdir(parents=True, exist_ok=True)
    if shutil.disk_usage(final.parent).free < FREE_BYTES:
        raise BuildError(f"less than {FREE_BYTES >> 30} GiB are free in {final.parent}")
    with tempfile.TemporaryDirectory(prefix=".", dir=final.parent) as temporary:
        folder = Path(temporary) / "part"
        folder.mkdir()
        yield folder
        if not final.exists():
            folder.rename(final)


def _pip(python: Path, target: Path, arguments: Sequence[str], deadline: float) -> None:
    """Install into a folder, with a pip that knows new interpreters; the interpreter's own may be missing or old."""
    pip = cache_directory() / "pip-25.3"
    if not pip.exists():
        with _part(pip) as folder:
            _install([sys.executable, "-m", "pip"], folder, ["pip==25.3"], {}, deadline)
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {canonicalize_name(Requirement(each).name) for each in arguments if "==" in each}
    pins = [pin for pin in pins if canonicalize_name(pin.partition("==")[0]) not in pinned]
    constraints = target.with_name("constraints.txt")
    constraints.write_text("\n".join(pins), encoding="utf-8")
    options = ["--no-compile", "--only-binary", ":all:", "--constraint", str(constraints)]
    _install([str(python), "-m", "pip"], target, [*options, *arguments], {"PYTHONPATH": str(pip)}, deadline)


def _install(pip: list[str], target: Path, arguments: list[str], variables: dict[str, str], deadline: float) -> None:
    limit = max(0.0, min(PIP_SECONDS, deadline - time.monotonic()))
    command = [*pip, "install", "--quiet", "--no-cache-dir", "--disable-pip-version-check", "--target", str(target)]
    try:
        ran = subprocess.run(
            [*command, *arguments],
            check=False,
            capture_output=True,
            text=True,
            timeout=limit,
            env={**os.environ, "PIP_ROOT_USER_ACTION": "ignore", **variables},
        )
    except subprocess.TimeoutExpired:
        raise BuildError(f"pip did not finish within {limit:g} s") from None
    if ran.returncode:
        errors = [line for line in ran.stderr.splitlines() if line.startswith("ERROR")]
        raise BuildError(f"pip: {(errors or ran.stderr.splitlines() or ['no message'])[-1]}")


def _remove(folder: Path, *patterns: str) -> None:
    for pattern in patterns:
        for path in folder.glob(pattern):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _hash(texts: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:12]
