"""The code of the documents runs when pasted, page by page, from top to bottom."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from support.documents import DOCUMENTS, ROOT, run_document

#: Number of blocks of each page that are not run; each has its reason next to it. All other blocks run.
SKIPPED = {
    "CONTRIBUTING.md": 1,
    "README.md": 2,  # sets everything up, installs
    "bench/README.md": 13,
    "docs/gguf.md": 1,  # a model of transformers
    "docs/index.md": 1,  # installs
    "docs/measuring.md": 1,  # many processes
    "docs/migrating.md": sum(find_spec(name) is None for name in ("lightning", "diffusers")),
    "docs/own-loading.md": 1,
    "docs/performance-log.md": 6,
    "docs/performance.md": 2,
    "docs/quantizing.md": 4,  # torchao, bitsandbytes, minutes
    "docs/quickstart.md": 1,
    "docs/planning.md": 1,
    "docs/ranks.md": 4,  # several ranks
    "docs/recipes/fine-tuning.md": 1,  # peft and a large model
    "docs/recipes/limited-memory.md": 3,  # Docker, an accelerator
    "docs/reliability.md": 2,  # minutes; environments of several gigabytes
    "docs/remote.md": 4,  # a bucket and credentials
    "docs/saving.md": 1,  # several ranks
    "docs/streaming.md": 3,  # torchao, a checkpoint of Mixtral, an accelerator
}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_block_of_the_page_runs(path: Path, tmp_path: Path) -> None:
    outcome = run_document(path, tmp_path)
    tokens = MarkdownIt().parse(path.read_text(encoding="utf-8"))
    indented = [token.map for token in tokens if token.type == "code_block"]
    assert not indented, "fence code blocks, so that they are run"
    # A second parser counts the blocks, so that a missed one is noticed.
    code = [token for token in tokens if token.type == "fence" and token.info != "text"]
    assert len(outcome.skipped) == SKIPPED.get(str(path.relative_to(ROOT)), 0), outcome.skipped
    assert all(len(reason) > 8 for _, reason in outcome.skipped), outcome.skipped
    assert outcome.executed + len(outcome.skipped) == len(code)


def test_pages_that_skip_blocks_exist() -> None:
    assert SKIPPED.keys() <= {str(path.relative_to(ROOT)) for path in DOCUMENTS}


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("```python\n1 / 0\n```\n", ZeroDivisionError),
        ("```bash\nsluice inspect no-such-file\n```\n", AssertionError),
        ("```bash\nfalse | true\n```\n", AssertionError),
        ('<!-- skip: next "it is not right" -->\n\n```python\n1 +\n```\n', SyntaxError),
        ("```\nanything\n```\n", ValueError),
        ("```ruby\n1\n```\n", ValueError),
        ("<!-- invisible-code-block: python\n1 / 0\n-->\n", ZeroDivisionError),
        ("1. A list\n\n   ```python\n   1 / 0\n   ```\n", ZeroDivisionError),
    ],
)
def test_a_block_that_is_wrong_is_noticed(tmp_path: Path, text: str, error: type[Exception]) -> None:
    (tmp_path / "page.md").write_text(text, encoding="utf-8")
    (tmp_path / "empty").mkdir()
    with pytest.raises(error):
        run_document(tmp_path / "page.md", tmp_path / "empty")


def test_the_readme_shows_real_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_document(ROOT / "README.md", tmp_path)
    output = capsys.readouterr().out
    for part in (", 16.0 MiB on cpu", "cast float32->bfloat16: 4 tensors", "torch.Size([1, 1024])", "'up.weight'"):
        assert part in output
