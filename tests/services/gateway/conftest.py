"""A gateway on free ports between fakes and the official client, with a tiny byte-level model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from collections.abc import Sequence as Items
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest
import uvicorn.server
from openai import AsyncOpenAI
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.services.gateway.fake_scheduler import FakeScheduler
from tests.services.gateway.fakes import FakeDecode
from weft.grammar import load_grammars
from weft_services.gateway.config import GatewayConfig
from weft_services.gateway.mesh.choice_text import ChoiceText, ChoiceUpdate
from weft_services.gateway.mesh.decode_connection import SequenceUpdate
from weft_services.gateway.process import Gateway, running

MODEL_NAME = "tiny"
CONTEXT = 512
VOCABULARY = 320
SIZES = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
END = 2  # <|im_end|>
TEMPLATE = (
    "{%- for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{%- if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}<|im_end|>\n{% endfor -%}"
    "{%- if tools %}{{ tools | tojson }}{% endif -%}"
    "{%- if messages[0].content == 'refuse me' %}{{ raise_exception('roles must alternate') }}{% endif -%}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif -%}"
)


def tiny_tokenizer() -> Tokenizer:
    """Byte-level BPE: 4 special tokens, 256 bytes, a few merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = ("<|pad|>", "<|bos|>", "<|im_end|>", "<|im_start|>")
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - 8,  # the model's embedding has a few rows more, as real ones do
        special_tokens=[AddedToken(name, special=True, normalized=False) for name in names],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the answer is here and there, hello world, user assistant"] * 4, trainer)
    return tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """What the tiny model's ids mean."""
    return tiny_tokenizer()


def write_model(parent: Path, tokenizer: Tokenizer, template: str, context: int = CONTEXT) -> Path:
    """A checkpoint directory without weights: the gateway needs none."""
    path = parent / MODEL_NAME
    path.mkdir()
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "config.json").write_text(json.dumps({**SIZES, "max_position_embeddings": context}))
    (path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<|bos|>", "eos_token": "<|im_end|>"}))
    (path / "generation_config.json").write_text(json.dumps({"do_sample": True, "temperature": 0.7, "top_p": 0.9}))
    (path / "chat_template.jinja").write_text(template)
    return path


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Path:
    """The tiny model."""
    return write_model(tmp_path_factory.mktemp("models"), tokenizer, TEMPLATE)


@pytest.fixture(scope="session", autouse=True)
def hasty_uvicorn() -> Iterator[None]:
    """Whenever it stops uvicorn sleeps for a tenth of a second, and here gateways stop a thousand times."""
    hasty = ModuleType("asyncio")
    vars(hasty).update(vars(asyncio), sleep=lambda seconds: asyncio.sleep(seconds / 20))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(uvicorn.server, "asyncio", hasty)
        yield


@dataclass(slots=True)
class Bench:
    """Everything a test touches."""

    gateway: Gateway
    scheduler: FakeScheduler
    decoders: list[FakeDecode]
    client: AsyncOpenAI
    http: httpx.AsyncClient
    tokenizer: Tokenizer
    model: str = ""

    @property
    def decode(self) -> FakeDecode:
        return self.decoders[0]

    @property
    def lenient(self) -> AsyncOpenAI:
        """For what OpenAI sends and its SDK's types do not know: chunks of completions, vectors in base64."""
        return self.client.copy(_extra_kwargs={"_strict_response_validation": False})

    @property
    def url(self) -> str:
        return f"http://{self.gateway.http_address}"

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text).ids)

    def allows(self, text: str, is_whole: bool = True) -> bool:
        """True if the grammar of the last request allows this answer, or with `is_whole` False, this beginning."""
        grammars = load_grammars(Path(self.model), VOCABULARY, [END])
        matcher = grammars.compile(self.decode.started[-1].sampling.grammar.text)
        matcher.accept([*self.ids(text), *([END] if is_whole else [])])
        return matcher.failure is None

    async def refused(self, path: str, **fields: Any) -> tuple[int, dict[str, Any]]:
        """Post what should be refused; status and the inner error object, whose keys are checked."""
        response = await self.http.post(path, json={"model": MODEL_NAME, **fields})
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return response.status_code, error


class Heard:
    """Tokens that have reached the text of their sequences, and pieces of prompts' scores."""

    count = 0


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count them in `Heard`."""
    monkeypatch.setattr(Heard, "count", 0)
    accept = ChoiceText.accept

    def counting(sequence: ChoiceText, deltas: Items[SequenceUpdate]) -> ChoiceUpdate:
        piece = accept(sequence, deltas)
        Heard.count += sum(len(each.token_ids) + (each.prompt_logprobs is not None) for each in deltas)
        return piece

    monkeypatch.setattr(ChoiceText, "accept", counting)


MakeBench = Callable[..., AbstractAsyncContextManager[Bench]]


@pytest.fixture
def bench(model_dir: Path, tokenizer: Tokenizer, tmp_path: Path) -> MakeBench:
    """`async with bench(num_decoders=2, max_requests=1) as b:`. `context`: of a tiny model that answers at length."""

    @asynccontextmanager
    async def make(num_decoders: int = 1, context: int = CONTEXT, **settings: Any) -> AsyncIterator[Bench]:
        directory = model_dir if context == CONTEXT else write_model(tmp_path, tokenizer, TEMPLATE, context)
        decoders = [FakeDecode(f"decode-{i}", f"boot-{i}") for i in range(num_decoders)]
        async with AsyncExitStack() as stack:
            for decoder in decoders:
                await decoder.open()
                stack.push_async_callback(decoder.kill)
            scheduler = FakeScheduler(decoders, MODEL_NAME, context)
            await scheduler.open()
            stack.push_async_callback(scheduler.kill)
            defaults = {"model": str(directory), "http_port": 0, "grpc_port": 0, "grace_seconds": 1}
            config = GatewayConfig(scheduler_addr=scheduler.address, **{**defaults, **settings})
            gateway = await stack.enter_async_context(running(config))
            await gateway.watch.poll()
            url = f"http://{gateway.http_address}"
            client = AsyncOpenAI(
                base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=20, _strict_response_validation=True
            )
            await stack.enter_async_context(client)
            http = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=20))
            yield Bench(gateway, scheduler, decoders, client, http, tokenizer, config.model)

    return make
