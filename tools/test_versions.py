"""Run the core profile of the tests with several versions of Python, torch, numpy and transformers.

``python -m tools.test_versions [NAME ...]`` builds each environment below, or the named ones, runs the core profile in
it and prints a table in Markdown. An environment that cannot be built here, because there is no such interpreter or a
registry is slow, is a row with the reason. The exit status is 1 if a test fails.

``--all`` runs all tests instead of the core profile, ``--select ...`` passes arguments to pytest, such as files.
``--build`` only builds. ``--within SECONDS`` is for CI, which has a limit for everything together: what is not built or
tested by then is a row with the reason.

The core profile is every test that is not marked ``long`` or ``ranks`` and not in ``NOT_CORE``: those parts do not
depend on the version of torch, or take long. It takes about two minutes on two cores.
"""

from __future__ import annotations

import argparse
import datetime as dt
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree as ET

from tools.version_environments import ROOT, BuildError, Environment, build

#: Each supported Python and torch versions between the ends of the range. The first two are the ends of each range.
ENVIRONMENTS = (
    Environment(name="oldest", python="3.11", torch="2.6.0", numpy="1.26.4", transformers="5.20.0"),
    Environment(name="newest", python="3.11", torch="2.15.0", numpy="2.4.6", transformers="5.24.0"),
    Environment(name="py312", python="3.12", torch="2.8.0", numpy="2.2.6", transformers="5.20.0"),
    Environment(name="py313", python="3.13", torch="2.14.1", numpy="2.4.6", transformers="5.24.0"),
    Environment(name="py314", python="3.14", torch="2.15.0", numpy="2.4.6", transformers="5.24.0"),
)

#: Folders of tests that are not in the core profile.
NOT_CORE = (
    *("tests/api", "tests/converting", "tests/formats/safetensors", "tests/ranks", "tests/sharding"),
    *("tests/bench", "tests/benchmark", "tests/checking", "tests/checkpoint", "tests/cli", "tests/contracts"),
    *("tests/entries", "tests/formats/archives", "tests/gpu", "tests/machine", "tests/matching", "tests/measuring"),
    *("tests/planning", "tests/reports", "tests/rules", "tests/sources", "tests/support"),
    *("tests/integrations", "tests/writing"),
)

#: Seconds after which a run counts as hung.
RUN_SECONDS = 1800.0
_SHOWN_LINES = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of the tests in one environment."""

    environment: Environment
    #: Numbers of tests; all zero if the environment was not built.
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    #: Duration of the tests.
    seconds: float = 0.0
    #: Why the tests did not run, or ran only in part; empty if they ran.
    problem: str = ""
    #: Whether ``problem`` is a failure. An environment that cannot be built here is none.
    is_failure: bool = False
    #: End of pytest's output if a test failed.
    output: str = ""

    @property
    def ok(self) -> bool:
        """Whether nothing failed."""
        return not self.failed and not self.is_failure


def main(arguments: Sequence[str] | None = None) -> int:
    """Build, run and print; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="environments; by default all")
    parser.add_argument("--workers", type=int, default=2, help="processes that run tests (default: 2)")
    parser.add_argument("--all", action="store_true", help="run all tests that CI runs, not the core profile")
    parser.add_argument("--build", action="store_true", help="build the environments and run nothing")
    parser.add_argument("--within", type=float, default=math.inf, metavar="SECONDS", help="time for everything")
    parser.add_argument("--select", nargs=argparse.REMAINDER, help="arguments for pytest instead of a profile")
    options = parser.parse_args(arguments)
    unknown = set(options.names) - {each.name for each in ENVIRONMENTS}
    if unknown:
        parser.error(f"no such environment: {', '.join(sorted(unknown))}")
    selection = options.select or (["tests"] if options.all else core_profile())
    if options.workers > 1:
        selection = [*selection, "-n", str(options.workers), "--dist", "worksteal"]
    wanted = [each for each in ENVIRONMENTS if not options.names or each.name in options.names]
    deadline = time.monotonic() + options.within
    if options.build:
        return build_all(wanted, deadline)
    outcomes = []
    for environment in wanted:
        outcomes.append(tried(environment, selection, deadline))
        print(_line(outcomes[-1]), flush=True)
    print("\n" + table(outcomes, dt.datetime.now(tz=dt.UTC).date()))
    for outcome in outcomes:
        if not outcome.ok:
            print(f"\n{outcome.environment.name}: {outcome.problem}\n{outcome.output}")
    return int(any(not outcome.ok for outcome in outcomes))


def core_profile() -> list[str]:
    """Return arguments of pytest that select the core profile."""
    return ["tests", "-m", "not long and not ranks", *(f"--ignore={folder}" for folder in NOT_CORE)]


def build_all(environments: Sequence[Environment], deadline: float) -> int:
    """Build environments and print what cannot be built; return the exit status, always 0: a build is an offer."""
    for environment in environments:
        try:
            build(environment, deadline)
        except BuildError as error:
            print(f"{environment.name}: {error}", flush=True)
    return 0


def tried(environment: Environment, selection: Sequence[str], deadline: float = math.inf) -> Outcome:
    """Run the selected tests in an environment, until a moment of ``time.monotonic``."""
    try:
        python, folders = build(environment, deadline)
        with tempfile.TemporaryDirectory(prefix="sluice-versions-") as directory:
            return _run(environment, _environment_in(Path(directory), python, folders), selection, deadline)
    except BuildError as error:
        return Outcome(environment=environment, problem=str(error))


def table(outcomes: Sequence[Outcome], date: dt.date) -> str:
    """Return the outcomes as a table in Markdown."""
    rows = [
        "| Python | torch | numpy | transformers | passed | failed | skipped | date |",
        "|---|---|---|---|---:|---:|---:|---|",
    ]
    for outcome in outcomes:
        each = outcome.environment
        counts = f"{outcome.passed:,} | {outcome.failed:,} | {outcome.skipped:,} | {date.isoformat()}"
        if outcome.problem:
            counts = f"not tried: {outcome.problem} | | | "
        rows.append(f"| {each.python} | {each.torch} | {each.numpy} | {each.transformers} | {counts} |")
    return "\n".join(rows)


def counted(report: Path) -> tuple[int, int, int]:
    """Return the numbers of tests that passed, failed and were skipped, from pytest's XML report."""
    suites = list(ET.parse(report).getroot().iter("testsuite"))  # noqa: S314 - written by pytest
    total, failures, errors, skipped = (
        sum(int(suite.get(key, "0")) for suite in suites) for key in ("tests", "failures", "errors", "skipped")
    )
    return total - failures - errors - skipped, failures + errors, skipped


def _environment_in(directory: Path, python: Path, folders: Sequence[Path]) -> Path:
    """Make a virtual environment that finds this checkout and the packages; return its interpreter."""
    subprocess.run([python, "-m", "venv", "--without-pip", directory], check=True, capture_output=True)
    site = next(directory.glob("lib/python3.*/site-packages"))
    lines = [str(ROOT / "src"), *map(str, folders)]
    (site / "versions.pth").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return directory / "bin" / "python"


def _run(environment: Environment, python: Path, selection: Sequence[str], deadline: float) -> Outcome:
    report = python.parent.parent / "report.xml"
    command = [str(python), "-m", "pytest", "-q", "-m", "not long", "-p", "no:cacheprovider", f"--junit-xml={report}"]
    variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    begin = time.monotonic()
    late = deadline - begin < RUN_SECONDS
    limit = max(0.0, deadline - begin) if late else RUN_SECONDS
    try:
        ran = subprocess.run(
            [*command, *selection],
            check=False,
            cwd=ROOT,
            env=variables,
            capture_output=True,
            text=True,
            timeout=limit,
        )
    except subprocess.TimeoutExpired:
        problem = f"the tests did not finish within {limit:.0f} s"
        return Outcome(environment=environment, problem=problem, is_failure=not late)
    seconds = time.monotonic() - begin
    passed, failed, skipped = counted(report) if report.exists() else (0, 0, 0)
    output = "\n".join((ran.stdout + ran.stderr).splitlines()[-_SHOWN_LINES:]) if ran.returncode else ""
    broken = bool(ran.returncode) and not failed
    return Outcome(
        environment=environment,
        passed=passed,
        failed=failed,
        skipped=skipped,
        seconds=seconds,
        problem=f"pytest ended with {ran.returncode}" if broken else "",
        is_failure=broken,
        output=output,
    )


def _line(outcome: Outcome) -> str:
    each = outcome.environment
    versions = (
        f"{each.name}: Python {each.python}, torch {each.torch}, numpy {each.numpy}, transformers {each.transformers}"
    )
    if outcome.problem:
        return f"{versions}: {'FAILED' if outcome.is_failure else 'skipped'}: {outcome.problem}"
    counts = f"{outcome.passed} passed, {outcome.failed} failed, {outcome.skipped} skipped"
    return f"{versions}: {counts} in {outcome.seconds:.0f} s"


if __name__ == "__main__":
    sys.exit(main())
