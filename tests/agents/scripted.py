"""A model that asks for a listing once and then says what it was told, behind a real gateway."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tokenizers import Tokenizer

from tests.services.gateway.fake_scheduler import FakeScheduler
from tests.services.gateway.fakes import FakeDecode, SequenceDelta, Start, deltas
from weft_services.gateway.config import GatewayConfig
from weft_services.gateway.process import running

NANO = Path(__file__).parents[2] / "models/weft-nano"
# the command that a tool takes, by the names that agents give it
_COMMAND_FIELDS = ("command", "cmd")


@dataclass(slots=True)
class ScriptedModel:
    """`tools` are the shells it may ask for, in order of preference; `prompts` what it has been shown."""

    url: str
    tokenizer: Tokenizer
    marker: str = ""
    prompts: list[str] = field(default_factory=list)

    async def script(self, start: Start) -> AsyncIterator[SequenceDelta]:
        """Call the shell; when its result is there, repeat the file's name from it."""
        prompt = self.tokenizer.decode(list(start.token_ids), skip_special_tokens=False)
        self.prompts.append(prompt)
        for delta in deltas(start, self.tokenizer.encode(f"{self._answer(prompt)}<|im_end|>").ids):
            yield delta

    def _answer(self, prompt: str) -> str:
        results = re.findall(r"<tool_response>(.*?)</tool_response>", prompt, re.DOTALL)
        if results:
            names = re.findall(r"marker-\w+\.txt", results[-1])
            return f"The folder holds {', '.join(names) or 'nothing'}."
        call = shell_call(prompt)
        return "This is only a title." if call is None else f"<tool_call>{json.dumps(call)}</tool_call>"


def shell_call(prompt: str) -> dict[str, object] | None:
    """How to run `ls` with the tools that the prompt declares; None where it declares no shell."""
    for line in prompt.splitlines():
        if not line.startswith('{"') or '"parameters"' not in line:
            continue
        tool = json.loads(line)
        fields = tool["parameters"].get("properties", {})
        name = next((each for each in _COMMAND_FIELDS if each in fields), None)
        if name is None:
            continue
        command = ["ls"] if fields[name].get("type") == "array" else "ls"
        required = {each: "list the files" for each in tool["parameters"].get("required", ()) if each != name}
        return {"name": tool["name"], "arguments": {**required, name: command}}
    return None


@asynccontextmanager
async def scripted_gateway(model_dir: Path, tokenizer: Tokenizer) -> AsyncIterator[ScriptedModel]:
    """A gateway on a free port; whatever is asked of it, the script answers."""
    decode = FakeDecode()
    scheduler = FakeScheduler([decode], "nano", 1 << 18)
    await decode.open()
    await scheduler.open()
    try:
        config = GatewayConfig(
            scheduler_addr=scheduler.address, model=str(model_dir), http_port=0, grpc_port=0, grace_seconds=1
        )
        async with running(config) as gateway:
            await gateway.watch.poll()
            scripted = ScriptedModel(f"http://{gateway.http_address}", tokenizer)
            decode.script = scripted.script
            yield scripted
    finally:
        await scheduler.kill()
        await decode.kill()
