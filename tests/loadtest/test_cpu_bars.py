"""What the CPU comparison says of its figures: met, short, or not measured; and which of a peer's dtypes it leaves."""

from __future__ import annotations

import pytest
from loadtest.engine.cpu_bars import bars, is_behind

OURS = {"batch 1, ms": 16.0, "batch 8, ms": 25.0, "batch 32, ms": 40.0, "prefill tok/s": 1500.0, "first token, s": 2.0}


def times(factor: float) -> dict[str, float]:
    """A peer that takes so many times as long for everything."""
    return {name: value / factor if name == "prefill tok/s" else value * factor for name, value in OURS.items()}


def verdicts(peers: dict[str, dict[str, float]], least_step_ms: float = 14.0) -> dict[str, str]:
    found = bars("weft bf16", {"weft bf16": OURS, "weft fp32": times(0.1), **peers}, least_step_ms)
    return {bar.name: bar.verdict for bar in found}


def test_an_engine_ahead_of_everybody_meets_all_and_one_behind_none() -> None:
    assert set(verdicts({"llama.cpp f16": times(1.3), "vLLM bf16": times(1.2)}).values()) == {"met"}
    behind = verdicts({"llama.cpp f16": times(0.9), "vLLM bf16": times(0.9)}, least_step_ms=13.0)
    assert behind.pop("process start to first token, s") == "met"  # that bar is no peer's
    assert set(behind.values()) == {"short"}


def test_the_quickest_dtype_of_a_peer_counts_and_our_own_others_do_not() -> None:
    found = verdicts({"llama.cpp f16": times(1.3), "llama.cpp bf16": times(1.1), "vLLM fp32": times(2)})
    assert found["step at batch 8, of llama.cpp's"] == "short"  # 1 / 1.1 is more than 0.85
    assert found["step at batch 1, of llama.cpp's"] == "met"
    assert found["step at batch 32, of vLLM's"] == "met"


def test_a_peer_that_did_not_start_is_no_peer_that_was_beaten() -> None:
    found = verdicts({"transformers fp32": times(2)})
    assert found["step at batch 8, of llama.cpp's"] == found["step at batch 32, of vLLM's"] == "not measured"
    assert found["step at batch 8, of the quickest peer's"] == "met"
    assert verdicts({})["prefill, of the quickest peer's rate"] == "not measured"


def test_a_batch_that_was_left_out_is_not_measured() -> None:
    rest = {name: value for name, value in OURS.items() if name != "batch 1, ms"}
    found = {bar.name: bar.verdict for bar in bars("weft fp32", {"weft fp32": rest, "vLLM bf16": times(2)}, 14.0)}
    assert found["read bandwidth at batch 1"] == found["step at batch 1, of the quickest peer's"] == "not measured"
    assert found["step at batch 32, of vLLM's"] == "met"


def test_batches_that_nobody_was_asked_for_are_not_measured() -> None:
    ours, theirs = ({name: of[name] for name in of if "batch" not in name} for of in (OURS, times(2)))
    found = {bar.name: bar.verdict for bar in bars("weft fp32", {"weft fp32": ours, "vLLM bf16": theirs}, 14.0)}
    assert {found[name] for name in found if "batch" in name} == {"not measured"}
    assert found["prefill, of the quickest peer's rate"] == "met"


@pytest.mark.parametrize("name", OURS)
def test_a_dtype_is_left_only_if_it_is_behind_in_everything(name: str) -> None:
    assert is_behind(times(1.2), OURS)
    assert not is_behind({**times(1.2), name: OURS[name]}, OURS)
    assert not is_behind(OURS, times(1.2))
