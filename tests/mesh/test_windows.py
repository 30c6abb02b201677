"""A model of which some layers see a window only, through separate processes, Mooncake and the shared store."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.mesh.conftest import MODEL, Mesh
from tests.mesh.oracle import greedy, prompts
from tests.mesh.test_tokens import complete
from weft.kv.layer_groups import PagingPolicy
from weft.model.config import read_config
from weft.model.kv_layout import block_bytes, kv_groups

pytestmark = pytest.mark.timeout(300)
NUM_TOKENS = 12


def make_windowed(directory: Path) -> Path:
    """weft-nano's weights, with biases of zero, in a Qwen2 whose last four layers see 48 tokens."""
    shutil.copytree(MODEL, directory, ignore=shutil.ignore_patterns("draft"))  # its head is for another model
    weights = load_file(MODEL / "model.safetensors")
    for name in [name for name in weights if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))]:
        weights[name.replace("weight", "bias")] = torch.zeros(len(weights[name]), dtype=weights[name].dtype)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((MODEL / "config.json").read_text())
    config |= {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "use_sliding_window": True}
    config |= {"sliding_window": 48, "max_window_layers": 2}
    config |= {"layer_types": ["full_attention"] * 2 + ["sliding_attention"] * 4}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def test_tokens_are_exact_cold_warm_and_from_the_store_and_pages_out_of_sight_stay_where_they_are(
    tmp_path: Path,
) -> None:
    model = make_windowed(tmp_path / MODEL.name)
    groups = kv_groups(read_config(model))
    paging = PagingPolicy(groups.spans, 16, 64)
    assert len(groups.spans) == 3
    running = Mesh(
        *("--transport", "mooncake"),
        environment={"WEFT_CHUNK_TOKENS": str(paging.chunk_tokens), "WEFT_STORE_FETCH_POLICY": "always"},
        models=[model],
    )
    asked = prompts(8, 20, 400, salt=4)
    expected = [greedy(prompt, NUM_TOKENS, model) for prompt in asked]
    assert expected != [greedy(prompt, NUM_TOKENS) for prompt in asked], "the window makes no difference"

    def cached_of_exact_answers() -> list[int]:
        answers = [complete(running, prompt) for prompt in asked]
        assert [answer["choices"][0]["token_ids"] for answer in answers] == expected
        return [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]

    try:
        running.wait_ready()
        assert cached_of_exact_answers() == [0] * len(asked)
        size = block_bytes(read_config(model), "float32", 16)
        moved = sum(
            len(paging.needed_blocks(group, 0, len(prompt), len(prompt))) for group in range(3) for prompt in asked
        )
        assert running.metric("decode-0", "weft_kv_transfer_bytes_total", transport="mooncake") == moved * size
        # one ends with a block: its repetition looks at a page more than the token behind it
        assert any(len(prompt) % 16 == 0 for prompt in asked)
        full = [(len(prompt) - 1) // 16 * 16 for prompt in asked]
        assert cached_of_exact_answers() == full
        running.wait_idle()
        # both pools are emptied, so whatever is cached now comes out of the store
        running.kill_and_wait_for_return("prefill-0", "decode-0")
        assert cached_of_exact_answers() == full
        assert running.metric("prefill-0", "weft_prefix_cache_hit_tokens_total", tier="dram") > 0
        running.wait_idle()
    finally:
        running.stop()
