"""Bugs that other servers' streams were shipped with, and which tests here would catch each."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
# what was reported where: the tests that would fail
KNOWN = {
    "ids of tool calls repeated or missing, so that deltas cannot be joined (codex 7517)": [
        "services/gateway/test_tools.py::test_a_stream_joins_to_the_same_by_the_sdks_own_helper",
        "services/gateway/test_tool_parsers.py::test_calls_and_text_are_found_however_the_answer_is_cut",
    ],
    "finish_reason stop where tool calls were streamed (python-genai 2868)": [
        "services/gateway/test_tools.py::test_a_stream_joins_to_the_same_by_the_sdks_own_helper",
        "mesh/test_tools.py::test_a_tool_is_called",
    ],
    "arguments lost when the call completes inside the last delta (sglang 32167)": [
        "services/gateway/test_tools.py::test_a_call_that_completes_within_the_last_delta_is_whole",
        "services/gateway/test_tool_parsers.py::test_calls_and_text_are_found_however_the_answer_is_cut",
    ],
    "a delta with empty arguments breaks whoever joins (LiteLLM 39288)": [
        "services/gateway/test_tools.py::test_a_stream_joins_to_the_same_by_the_sdks_own_helper",
        "clients/litellm_checks.py::test_tools_are_called",
    ],
    "a stream of the Responses API without its last event (vLLM 52418)": [
        "services/gateway/test_responses.py::test_a_stream_that_fails_ends_with_response_failed",
        "services/gateway/test_responses.py::test_an_answer_that_is_cut_off_is_incomplete",
    ],
    "cached tokens none or twice behind a hand-off (tt-inference-server 4120, LMCache 2511 and 1547)": [
        "mesh/test_cache.py::test_turn_two_reports_all_full_blocks_of_turn_one",
        "mesh/test_tokens.py::test_cold_warm_and_after_a_store_hit_in_chunks_of_16",
        "services/gateway/test_migrations.py::test_usage_is_that_of_the_clients_prompt_and_of_one_answer",
    ],
    "a stream that hangs for ever when blocks do not arrive (vLLM 51518, llm-d 2433)": [
        "services/decode/test_failures.py::test_a_pull_that_fails",
        "services/decode/test_failures.py::test_a_pull_that_nobody_has_patience_for",
        "services/decode/test_stalled.py::test_silence_longer_than_the_lease_ends_the_call",
    ],
    "a time to the first token without hand-off and first step (inference-sim 930)": [
        "services/gateway/test_chat.py::test_the_time_to_the_first_token_is_the_clients_whatever_the_mesh_did_before",
        "mesh/test_page.py::test_the_stages_of_an_answer_fit_between_routing_and_the_first_token",
    ],
}


@pytest.mark.parametrize("bug", KNOWN)
def test_every_known_bug_has_a_test(bug: str) -> None:
    for place in KNOWN[bug]:
        path, _, name = place.partition("::")
        module = ast.parse((TESTS / path).read_text())
        functions = (ast.FunctionDef, ast.AsyncFunctionDef)
        assert name in {node.name for node in module.body if isinstance(node, functions)}, place
