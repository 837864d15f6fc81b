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


def test_a_headline_has_time_and_memory_of_sluice_and_of_the_usual_way() -> None:
    assert _headline({"naive": _USUAL, "sluice": _OURS}) == (
        "sluice loaded GPT-2 small (fp32, cold) in 1.00 s with 1.04 F; plain torch.load took 2.00 s with 2.00 F"
    )


def test_methods_that_did_better_are_named() -> None:
    mapped = good("mmap", 0.5, FINAL_BYTES, mapped=True)
    assert _headline({"naive": _USUAL, "mmap": mapped, "sluice": _OURS}).endswith(
        "with 2.00 F; mmap was faster and leaner: 0.50 s with 1.00 F"
    )
    apart = {"mmap": good("mmap", 0.5, 600 * MIB), "per-parameter": good("per-parameter", 3.0, FINAL_BYTES)}
    assert _headline({**apart, "sluice": _OURS}).endswith(
        "; mmap was faster: 0.50 s with 1.20 F; per-parameter was leaner: 3.00 s with 1.00 F"
    )
    assert _headline({"naive": good("naive", 0.9, FINAL_BYTES), "sluice": _OURS}).endswith(
        "; plain torch.load was faster and leaner: 0.90 s with 1.00 F"
    )


def test_equal_figures_are_not_called_better() -> None:
    equal = good("naive", 0.999, 520 * MIB - 1000)
    assert _headline({"naive": equal, "sluice": _OURS}).endswith("; plain torch.load took 1.00 s with 1.04 F")


def test_failures_are_stated() -> None:
    assert _headline({"naive": _USUAL, "sluice": killed(1.0, 3 * MIB)}) == (
        "sluice was killed while it loaded GPT-2 small (fp32, cold); plain torch.load took 2.00 s with 2.00 F"
    )
    wrong = replace(_OURS, verdict=Verdict(weights="other", logits=(1.0,)))
    assert _headline({"naive": _USUAL, "sluice": wrong}).startswith("sluice loaded wrong weights into GPT-2 small")
    assert _headline({"naive": killed(1.0, MIB), "mmap": killed(1.0, MIB), "sluice": _OURS}).endswith(
        "with 1.04 F; plain torch.load was killed; did not finish: mmap"
    )


def test_without_sluice_nothing_is_claimed_for_it() -> None:
    assert _headline({"naive": _USUAL, "mmap": good("mmap", 1.5, FINAL_BYTES)}) == (
        "mmap loaded GPT-2 small (fp32, cold) in 1.50 s with 1.00 F"
    )
    assert _headline({"naive": killed(1.0, MIB)}) == "no method loaded GPT-2 small (fp32, cold)"


def test_there_is_a_sentence_for_each_table_and_state() -> None:
    tight = scenario("bfloat16", limit=800 << 20)
    compared = [_FREE, tight]
    assert list(findings(compared, [run for each in compared for run in runs_of(each)])) == [
        f"fp32, {state}: sluice took 1.00 s with 1.04 F; plain torch.load took 2.00 s with 2.00 F; "
        "mmap was leaner: 1.50 s with 1.00 F."
        for state in ("cold", "cached")
    ] + [
        f"bf16, {state}, limit 800 MiB: sluice took 1.00 s with 1.04 F; plain torch.load was killed; "
        "mmap was leaner: 1.50 s with 1.00 F."
        for state in ("cold", "cached")
    ]
    assert explain_final_bytes(compared).startswith(
        "F is the size of the finished model: 500 MiB in fp32, 500 MiB in bf16."
    )
