"""The versions that are tested reach both ends of what the project supports, and their table says what happened."""

from __future__ import annotations

import datetime as dt
import tomllib
from importlib.metadata import requires
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from tools import test_versions, version_environments
from tools.test_versions import ENVIRONMENTS, NOT_CORE, Outcome, counted, main, table
from tools.version_environments import ABOVE_TORCH, ROOT, BuildError, package_requirements, torch_requirements

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
OLDEST, NEWEST = ENVIRONMENTS[:2]


def bound(requirements: list[str], name: str) -> Requirement:
    return next(each for each in map(Requirement, requirements) if each.name == name)


def test_both_ends_of_each_range_are_tested() -> None:
    extras = PROJECT["optional-dependencies"]
    for name, requirements in (("torch", PROJECT["dependencies"]), ("numpy", PROJECT["dependencies"])):
        [minimum] = bound(requirements, name).specifier
        assert minimum.operator == ">="
        assert getattr(OLDEST, name).startswith(f"{minimum.version}."), name
    transformers = bound(extras["hf"], "transformers").specifier
    for environment in ENVIRONMENTS:
        assert transformers.contains(environment.transformers)
    lowest = next(each.version for each in transformers if each.operator == ">=")
    assert OLDEST.transformers.startswith(f"{lowest}.")
    prefix = "Programming Language :: Python :: "
    classified = {each.removeprefix(prefix) for each in PROJECT["classifiers"] if each.startswith(prefix)}
    assert {each.python for each in ENVIRONMENTS} == classified
    assert OLDEST.python == PROJECT["requires-python"].removeprefix(">=")
    oldest, *_, newest = sorted(classified, key=lambda each: int(each.removeprefix("3.")))
    assert f"Python {oldest} to {newest}" in (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    assert "Typing :: Typed" in PROJECT["classifiers"]
    assert not any(each.startswith("License ::") for each in PROJECT["classifiers"])  # the expression says it


def test_the_core_profile_leaves_out_folders_that_exist() -> None:
    assert [folder for folder in NOT_CORE if not (ROOT / folder).is_dir()] == []


def test_tested_versions_replace_the_pins() -> None:
    requirements = package_requirements(OLDEST)
    assert {f"numpy=={OLDEST.numpy}", f"transformers=={OLDEST.transformers}", "safetensors", "pytest"} <= {
        *requirements
    }
    assert not {"torch", "sluice", "ruff"} & {*requirements}


def test_packages_that_require_torch_are_installed_without_it() -> None:
    for requirement in map(Requirement, package_requirements(OLDEST)):
        needed = [Requirement(each) for each in requires(requirement.name) or []]
        needs_torch = any(each.name == "torch" and each.marker is None for each in needed)
        assert needs_torch == (requirement.name in ABOVE_TORCH), requirement.name


def test_only_the_cuda_libraries_that_torch_links_to_are_installed(tmp_path: Path) -> None:
    lines = [
        "sympy>=1.13",
        'cuda-toolkit[cublas,cusolver]==13.2; platform_system == "Linux"',
        'nvidia-cusolver-cu12==11.6; platform_system == "Linux"',
        'nvidia-cudnn-cu12==9.1; platform_system == "Linux"',
        'nvidia-cublas-cu12==12.4; platform_system == "no such system"',
        "triton==3.2",
        'optree>=0.13; extra == "optree"',
    ]
    (tmp_path / "torch-2.6.0.dist-info").mkdir()
    text = "Name: torch\nVersion: 2.6.0\n" + "".join(f"Requires-Dist: {line}\n" for line in lines)
    (tmp_path / "torch-2.6.0.dist-info" / "METADATA").write_text(text, encoding="utf-8")
    assert torch_requirements(tmp_path, cuda=True) == ["cuda-toolkit[cublas]==13.2", "nvidia-cudnn-cu12==9.1"]
    assert torch_requirements(tmp_path, cuda=False) == ["sympy>=1.13"]


def test_the_table_and_the_counts(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text('<testsuites><testsuite tests="12" failures="1" errors="1" skipped="3"/></testsuites>')
    assert counted(report) == (7, 2, 3)
    ran = Outcome(environment=OLDEST, passed=4512, failed=2, skipped=1)
    absent = Outcome(environment=NEWEST, problem="no interpreter")
    lines = table([ran, absent], dt.date(2026, 11, 22)).splitlines()
    assert lines[2].endswith("| 4,512 | 2 | 1 | 2026-11-22 |")
    assert lines[3].endswith("| not tried: no interpreter | | |  |")


@pytest.mark.parametrize(
    ("how", "status"),
    [
        ({"passed": 1}, 0),
        ({"problem": "no interpreter"}, 0),
        ({"failed": 1, "output": "the end of the output"}, 1),
        ({"problem": "the tests did not finish", "is_failure": True}, 1),
    ],
)
def test_a_failing_test_fails_and_a_missing_environment_does_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], how: dict[str, Any], status: int
) -> None:
    monkeypatch.setattr(test_versions, "tried", lambda environment, *_: Outcome(environment=environment, **how))
    assert main(["oldest", "newest"]) == status
    printed = capsys.readouterr().out
    assert how.get("output", "") in printed
    assert ("skipped: no interpreter" in printed) == (how.get("problem") == "no interpreter")


@pytest.mark.parametrize("how", ["slow", "refused"])
def test_a_registry_that_does_not_answer_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "sluice-versions" / "pip-25.3").mkdir(parents=True)
    (tmp_path / "bin").mkdir()
    pip = tmp_path / "bin" / "python3"
    pip.write_text("#!/bin/sh\n" + ("exec sleep 60" if how == "slow" else "echo 'ERROR: no answer' >&2; exit 1"))
    pip.chmod(0o755)
    monkeypatch.setattr(version_environments, "find_interpreter", lambda _: pip)
    monkeypatch.setattr(version_environments, "PIP_SECONDS", 0.5 if how == "slow" else 60)
    monkeypatch.setattr(version_environments, "FREE_BYTES", 0)
    outcome = test_versions.tried(NEWEST, [])
    assert outcome.problem == ("pip did not finish within 0.5 s" if how == "slow" else "pip: ERROR: no answer")
    assert outcome.ok
    assert [each.name for each in (tmp_path / "sluice-versions").iterdir()] == ["pip-25.3"]


def test_an_interpreter_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BuildError, match=r"no interpreter python3\.99"):
        version_environments.find_interpreter("3.99")
