"""A text, or an answer, at which the tokenizer's library panics fails its own request and no other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import pytest
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers

from tests.services.gateway.conftest import END, MODEL_NAME, TEMPLATE, MakeBench, tiny_tokenizer, write_model
from tests.services.gateway.fakes import speaking
from tests.services.gateway.test_grpc import code_of
from weft_mesh.v1 import inference_service_pb2 as pb
from weft_mesh.v1.inference_service_pb2_grpc import InferenceServiceStub

# takes longer than the library lets a regex search
SLOW = "a" * 60 + "b"
ENDPOINTS: dict[str, Any] = {
    "/v1/chat/completions": lambda text: {"messages": [{"role": "user", "content": text}]},
    "/v1/completions": lambda text: {"prompt": text},
    "/v1/messages": lambda text: {"messages": [{"role": "user", "content": text}], "max_tokens": 9},
    "/v1/responses": lambda text: {"input": text},
    "/v1/embeddings": lambda text: {"input": text},
    "/tokenize": lambda text: {"prompt": text},
}


def picky(is_reading: bool) -> Tokenizer:
    """It panics at SLOW; or at a token of one letter that it is to take away from both sides."""
    tokenizer = tiny_tokenizer()
    if is_reading:
        steps = [pre_tokenizers.Split(Regex("(a|aa)+$"), "isolated"), tokenizer.pre_tokenizer]
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    else:
        tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Strip("h", 1, 1)])
    return tokenizer


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_a_text_that_cannot_be_read_fails_its_request(bench: MakeBench, tmp_path: Path, path: str) -> None:
    directory = write_model(tmp_path, picky(is_reading=True), TEMPLATE)
    async with bench(model=str(directory)) as b:
        response = await b.http.post(path, json={"model": MODEL_NAME, **ENDPOINTS[path](SLOW)})
        assert response.status_code == 500
        assert response.json()["error"]["message"] == "internal error"
        body = {"model": MODEL_NAME, "prompt": "x"}
        assert (await b.http.post("/v1/completions", json=body)).status_code == 200
        assert b.gateway.pipeline.num_in_flight == 0


async def test_a_call_whose_text_cannot_be_read_is_told(bench: MakeBench, tmp_path: Path) -> None:
    directory = write_model(tmp_path, picky(is_reading=True), TEMPLATE)
    async with bench(model=str(directory)) as b, grpc.aio.insecure_channel(b.gateway.grpc_address) as channel:
        stub: Any = InferenceServiceStub(channel)
        assert await code_of(stub.Generate(pb.GenerateRequest(text=SLOW))) is grpc.StatusCode.INTERNAL


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_cannot_be_read_is_an_error(bench: MakeBench, tmp_path: Path, stream: bool) -> None:
    directory = write_model(tmp_path, picky(is_reading=False), TEMPLATE)
    async with bench(model=str(directory)) as b:
        b.decode.script = speaking([*b.ids("x"), *b.ids("h"), END])
        response = await b.http.post("/v1/completions", json={"model": MODEL_NAME, "prompt": "x", "stream": stream})
        assert "internal error" in response.text
        assert stream or response.status_code == 500
        assert b.gateway.pipeline.num_in_flight == 0
