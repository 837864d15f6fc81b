"""Fuzz one target for a given time: ``python -m fuzz TARGET --seconds 60``. Findings are written to ``fuzz/findings``.

To run a finding again: ``python -m fuzz TARGET FILE``.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["sluice"]):
    from fuzz import targets

#: Maximum resident memory of the process in MiB, interpreter included.
_MAX_MIB = 768

#: Wall-clock time after which an input counts as a hang, in seconds; generous, because the machine may be busy.
_HANG_SECONDS = 20

#: Maximum size of an input, in bytes. Longer inputs find nothing that shorter ones cannot.
_MAX_INPUT_BYTES = 8192

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
            "max_len": _MAX_INPUT_BYTES,
            "max_total_time": arguments.seconds,
            "print_final_stats": 1,
            "rss_limit_mb": _MAX_MIB,
            "timeout": _HANG_SECONDS,
        }
        flags = [f"-{name}={value}" for name, value in options.items()]
        atheris.Setup([sys.argv[0], *flags, *corpus], lambda data: targets.run(arguments.target, data))
        atheris.Fuzz()  # ends the process


if __name__ == "__main__":
    main()
