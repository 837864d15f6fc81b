"""Lines of the source by feature, against a budget: ``python tools/lines.py``.

Each file of ``src/sluice`` belongs to the first feature whose pattern matches its path; one that no pattern matches is
an error. Comments, docstrings and blank lines count.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).parents[1]

#: Most lines. A change that needs more takes as many out elsewhere, or says why it raises them.
BUDGET = {"src/sluice": 59_971, "tests": 51_991}

#: Patterns of paths below src/sluice by feature; ``*`` also matches "/".
FEATURES = {
    "remote: HTTP": ("sources/remote/http*", "sources/remote/connections*", "sources/remote/retries*"),
    "remote: cache": ("sources/remote/cach*",),
    "remote: rest": ("sources/remote/*", "sources/remote_names.py", "*remote_options.py"),
    "ranks": (
        *("ranks/*", "sharding/*", "writing/ranks/*"),
        *(
            "loading/joint.py",
            "loading/rank_plans.py",
        ),
    ),
    "writing": ("writing/*", "api/save.py", "reports/save.py"),
    "bench in the package": ("benchmark/*", "cli/commands/bench.py", "cli/comparison.py"),
    "verify and diff": ("checking/*", "api/verify.py", "api/diff.py", "*/verify.py", "*/diff.py"),
    "shared copies": ("sharing/*", "*/shared.py", "cli/commands/share.py"),
    "merges": ("merging/*", "*/merge.py"),
    "convert": ("converting/*", "*/convert.py"),
    "optimizer resume": ("*optimizer*",),
    "rules": ("rules/*", "entries/rules.py", "entries/patterns.py"),
    "measuring": ("measuring/*",),
    "streaming": (
        *("streaming/*", "planning/streaming.py", "*/stream.py"),
        *("modules/unloaded.py", "modules/blocks.py"),
    ),
    "testing, shipped": ("testing/*",),
    "following other load_state_dict code": (
        *("modules/custom_loaders.py", "modules/following.py", "modules/load_hooks.py"),
        *("modules/meta_copy.py", "modules/symbolic_tensors.py"),
    ),
    "empty_init": (*("modules/constructor_calls.py", "modules/emptied.py", "modules/empty_init.py"),),
    "quantizing on load": ("quantizing/*", "loading/quantized*", "hf/_quant*", "hf/_bitsandbytes.py"),
    "Hugging Face models": ("hf/*",),
    "other libraries": ("integrations/*", "safetensors/*", "torch/*"),
    "adapters": ("adapters/*",),
    "DeepSpeed's directories": ("formats/deepspeed/*", "checkpoint/zero*"),
    "GGUF files": ("formats/gguf/*", "engine/packs.py"),
    "advice on other loaders": ("planning/other_methods.py",),
    "core": (
        *("_*.py", "api/*", "checkpoint/*", "cli/*", "engine/*", "entries/*", "formats/*", "loading/*"),
        *("machine/*", "matching/*", "modules/*", "planning/*", "reading/*", "records/*", "reports/*", "sources/*"),
    ),
}


def feature_of(path: str) -> str | None:
    """Return the feature of a path below src/sluice; None if no pattern matches."""
    matching = (name for name, patterns in FEATURES.items() if any(fnmatch(path, pattern) for pattern in patterns))
    return next(matching, None)


def count(files: Iterable[Path]) -> int:
    """Return the lines of files together."""
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)


def main() -> int:
    """Print the table; return 1 if a file has no feature or a total is above its budget."""
    source = ROOT / "src" / "sluice"
    lines: Counter[str] = Counter()
    for file in sorted(source.rglob("*.py")):
        feature = feature_of(file.relative_to(source).as_posix())
        if feature is None:
            print(f"{file.relative_to(ROOT)} has no feature: add a pattern to FEATURES in tools/lines.py")
            return 1
        lines[feature] += count([file])
    for feature, number in lines.most_common():
        print(f"{number:>7,}  {feature}")
    totals = {"src/sluice": lines.total(), "tests": count((ROOT / "tests").rglob("*.py"))}
    for name, total in totals.items():
        print(f"{total:>7,}  {name}, of at most {BUDGET[name]:,}")
    return int(any(total > BUDGET[name] for name, total in totals.items()))


if __name__ == "__main__":
    sys.exit(main())
