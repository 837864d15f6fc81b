"""The sentences about a comparison, which only state what its runs show."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from sluice.benchmark.headline import explain_final_bytes, findings, headline
from sluice.benchmark.records import MethodRun, Outcome, Verdict
from support.comparisons import FINAL_BYTES, MIB, good, killed, runs_of, scenario

_FREE = scenario()


def _headline(outcomes: Mapping[str, Outcome]) -> str:
    """Return the headline for these outcomes, in both states; the other methods were not compared."""
    runs = [run for run in runs_of(_FREE) if run.method == "reference"]
    runs += [
        MethodRun(scenario=_FREE.title, method=method, state=state, repetition=0, outcome=outcome)
        for method, outcome in outcomes.items()
        for state in _FREE.states
    ]
    compared = replace(_FREE, checkpoints=dict.fromkeys(outcomes, _FREE.checkpoints["sluice"]))
    return headline("GPT-2 small", [compared], runs)


_OURS = good("sluice", 1.0, 520 * MIB)
_USUAL = good("naive", 2.0, 2 * FINAL_BYTES)
_BOTH = "sluice took 1.00 s with 1.04 F; plain torch.load took 2.00 s with 2.00 F"


def test_a_headline_has_time_and_memory_of_sluice_and_of_the_usual_way() -> None:
    assert _headline({"naive": _USUAL, "sluice": _OURS}) == f"GPT-2 small, fp32, cold: {_BOTH}"


def test_methods_that_did_better_are_named() -> None:
    apart = {"mmap": good("mmap", 0.5, 600 * MIB), "per-parameter": good("per-parameter", 3.0, FINAL_BYTES)}
    assert _headline({"naive": _USUAL, **apart, "sluice": _OURS}).endswith(
        f"{_BOTH}; the fastest other method was mmap (maps the file instead of copying it): 0.50 s with 1.20 F; "
        "the leanest other method was per-parameter: 3.00 s with 1.00 F"
    )


def test_equal_figures_are_not_called_better() -> None:
    equal = good("mmap", 0.999, 520 * MIB - 1000)
    assert _headline({"naive": _USUAL, "mmap": equal, "sluice": _OURS}).endswith(_BOTH)


def test_why_sluice_was_the_slowest_is_explained() -> None:
    others = {"naive": good("naive", 0.8, 2 * FINAL_BYTES), "mmap": good("mmap", 0.1, FINAL_BYTES, mapped=True)}
    text = _headline({**others, "sluice": _OURS})
    assert "sluice was the slowest: a load this short is decided by what sluice does once" in text
    assert "slowest" not in _headline({**others, "naive": _USUAL, "sluice": _OURS})


def test_failures_are_stated() -> None:
    assert _headline({"naive": _USUAL, "sluice": killed(1.0, 3 * MIB)}).endswith(
        "cold: sluice was killed; plain torch.load took 2.00 s with 2.00 F"
    )
    wrong = replace(_OURS, verdict=Verdict(weights="other", logits=(1.0,)))
    assert "sluice loaded wrong weights" in _headline({"naive": _USUAL, "sluice": wrong})
    assert _headline({"naive": killed(1.0, MIB), "mmap": killed(1.0, MIB), "sluice": _OURS}).endswith(
        "with 1.04 F; plain torch.load was killed; did not finish: mmap"
    )


def test_without_sluice_nothing_is_claimed_for_it() -> None:
    text = _headline({"naive": _USUAL, "mmap": good("mmap", 1.5, FINAL_BYTES)})
    assert "sluice" not in text
    assert "the fastest other method was mmap" in text


def test_there_is_a_sentence_for_each_table_and_state() -> None:
    tight = scenario("bfloat16", limit=800 << 20)
    compared = [_FREE, tight]
    found = list(findings(compared, [run for each in compared for run in runs_of(each)]))
    assert [sentence.partition(":")[0] for sentence in found] == [
        *("fp32, cold", "fp32, cached", "bf16, cold, limit 800 MiB", "bf16, cached, limit 800 MiB")
    ]
    assert "plain torch.load was killed; the leanest other method was mmap" in found[-1]
    assert explain_final_bytes(compared).startswith(
        "F is the size of the finished model: 500 MiB in fp32, 500 MiB in bf16."
    )
