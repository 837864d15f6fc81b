"""Fuzz one target for a while: ``python -m fuzz TARGET --seconds 60``. Findings are written to ``fuzz/findings``.

A finding is run again with ``python -m fuzz TARGET FILE``.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["sluice"]):
    from fuzz import targets

#: Resident memory of the whole process, interpreter included.
_MOST_MIB = 768

#: Wall-clock seconds after which an input counts as a hang, on a machine that may be busy.
_HANG_SECONDS = 20

#: Longer inputs say nothing that shorter ones cannot.
_MOST_INPUT_BYTES = 8192

_HERE = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.add_argument("target", choices=sorted(targets.TARGETS))
    parser.add_argument("files", nargs="*", help="run these inputs once instead of fuzzing")
    parser.add_argument("--seconds", type=int, default=60)
    arguments = parser.parse_args()
    findings = _HERE / "findings"
    findings.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as grown:
        corpus = arguments.files or [grown, str(_HERE / "corpus" / arguments.target)]
        options = {
            "artifact_prefix": f"{findings}/{arguments.target}-",
            "max_len": _MOST_INPUT_BYTES,
            "max_total_time": arguments.seconds,
            "print_final_stats": 1,
            "rss_limit_mb": _MOST_MIB,
            "timeout": _HANG_SECONDS,
        }
        flags = [f"-{name}={value}" for name, value in options.items()]
        atheris.Setup([sys.argv[0], *flags, *corpus], lambda data: targets.run(arguments.target, data))
        atheris.Fuzz()  # ends the process


if __name__ == "__main__":
    main()
