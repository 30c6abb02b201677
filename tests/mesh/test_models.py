"""Two models of different families, sizes and vocabularies in one mesh: each answers as transformers says it does."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from tests.mesh.conftest import MODEL, Mesh, wait_until
from tests.mesh.oracle import greedy
from tests.services.gateway.conftest import VOCABULARY, tiny_tokenizer

pytestmark = pytest.mark.timeout(300)
OTHER = "qwen/tiny"
# in both vocabularies, and three blocks of 16: the keys of both models' blocks are the same
PROMPT = [5 + index % 300 for index in range(50)]
NUM_TOKENS = 8


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen2 with random weights, a tokenizer of its own and no chat template."""
    path = tmp_path_factory.mktemp("models") / "tiny"
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        eos_token_id=2,
    )
    torch.manual_seed(3)
    Qwen2ForCausalLM(config).save_pretrained(path)
    tiny_tokenizer().save(str(path / "tokenizer.json"))
    return path


@pytest.fixture(scope="module")
def both(other: Path) -> Iterator[Mesh]:
    """A prefill and a decode worker of each."""
    running = Mesh(models=[MODEL, f"{OTHER}={other}"])
    try:
        running.wait_ready()
        wait_until("both models can be served", lambda: running.client.get("/ready").json()["reasons"] == [], 60)
        yield running
    finally:
        running.stop()


@pytest.fixture
def client(both: Mesh) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{both.url}/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


def tokens_of(both: Mesh, model: str) -> tuple[list[int], int]:
    """The answer to PROMPT, and how much of it was cached."""
    body = {"model": model, "prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
    answer = both.client.post("/v1/completions", json=body | {"return_token_ids": True}).json()
    return answer["choices"][0]["token_ids"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_requests_go_by_name_to_workers_of_that_model_and_caches_do_not_mix(both: Mesh, other: Path) -> None:
    for cached in (0, 48):
        for name, directory in ((MODEL.name, MODEL), (OTHER, other)):
            assert tokens_of(both, name) == (greedy(PROMPT, NUM_TOKENS, directory), cached), name
    served = {name: status.hello.model for name, status in both.workers().items()}
    assert served == {"prefill-0": MODEL.name, "decode-0": MODEL.name, "prefill-1": OTHER, "decode-1": OTHER}
    assert both.metric("decode-1", "weft_engine_tokens_total", kind="generated") > 0


def test_clients_see_both_and_are_told_the_names_when_they_ask_for_a_third(both: Mesh, client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list().data] == [MODEL.name, OTHER]
    assert client.models.retrieve(OTHER).to_dict()["max_model_len"] == 256
    text = client.completions.create(model=OTHER, prompt="hello world", max_tokens=4).choices[0].text
    assert isinstance(text, str)
    with pytest.raises(openai.NotFoundError, match=f"'third'.*'{MODEL.name}', '{OTHER}'"):
        client.completions.create(model="third", prompt="x")
    with pytest.raises(openai.BadRequestError, match="no chat template"):
        client.chat.completions.create(model=OTHER, messages=[{"role": "user", "content": "x"}])


def test_status_shows_who_serves_what(both: Mesh) -> None:
    address = both.child("gateway").environ()["WEFT_SCHEDULER_ADDR"]
    command = [sys.executable, "-m", "weft.cli.main", "status", "--scheduler", address, "--json"]
    told = json.loads(subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout)
    assert {worker["worker_id"]: worker["model"] for worker in told["workers"]}["decode-1"] == OTHER


def test_one_model_without_workers_leaves_the_other_alone(both: Mesh, client: openai.OpenAI) -> None:
    old = both.boots()
    both.kill("decode-1")
    assert tokens_of(both, MODEL.name)[0] == greedy(PROMPT, NUM_TOKENS)
    assert both.is_ready()
    both.wait_for_return(old, "decode-1")
    wait_until("both models can be served", lambda: both.client.get("/ready").json()["reasons"] == [], 60)
    assert len(tokens_of(both, OTHER)[0]) == NUM_TOKENS
