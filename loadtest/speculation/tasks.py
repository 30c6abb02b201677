"""Fixed tasks of the speculation benchmark, for any chat model.

The answers of `chat`, `tools` and `repeat` are the model's own. Weft-nano cannot rewrite a file, so `edit` and
`rewrite` replay the answer that a good model would give: a constraint allows only its next token. Time, rows and
acceptance are then those of that text.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from training.weft_nano.dialogues import Style, make_dialogue
from training.weft_nano.entities import Source
from transformers import PreTrainedTokenizerBase

NUM_PROMPTS = 16
MIN_CHAT_CHARACTERS = 60
CALL = "<tool_call>"

FILE = '''"""Keeps the stock of a small shop."""

from dataclasses import dataclass

LOW_STOCK = 10


@dataclass
class Item:
    name: str
    price: float
    count: int = 0


class Stock:
    def __init__(self):
        self.items = {}

    def add_item(self, name, price, count):
        if name in self.items:
            raise ValueError(f"{name} is already in stock")
        self.items[name] = Item(name, price, count)

    def remove_item(self, name):
        if name not in self.items:
            raise ValueError(f"{name} is not in stock")
        del self.items[name]

    def sell(self, name, count):
        item = self.items[name]
        if item.count < count:
            raise ValueError(f"only {item.count} of {name} are left")
        item.count -= count
        return item.price * count

    def low_items(self):
        return [item.name for item in self.items.values() if item.count < LOW_STOCK]

    def total_value(self):
        return sum(item.price * item.count for item in self.items.values())
'''
NAMES = "take order release ship hand_out deliver issue dispatch draw trade pack lend send buy_back move give".split()


@dataclass(frozen=True, slots=True)
class Prompt:
    """`replayed`: the answer that is forced; None lets the model answer. `grammar`: of the answer."""

    token_ids: tuple[int, ...]
    max_tokens: int
    replayed: tuple[int, ...] | None = None
    grammar: str | None = None


class ReplayedText:
    """Allows one text only, then the end token; implements `weft.engine.messages.Constraint`."""

    def __init__(self, token_ids: tuple[int, ...]) -> None:
        self._token_ids = token_ids
        self._place = 0

    def accept(self, token_ids: Any) -> None:
        self._place += len(token_ids)

    def rollback(self, num_tokens: int) -> None:
        self._place -= num_tokens

    def valid(self, token_ids: Any) -> int:
        # Wrong drafts pass: without a grammar they would be verified too, and they must cost as much here.
        return min(len(token_ids), len(self._token_ids) - self._place)

    def forced(self) -> list[int]:
        return []  # The text is known only here.

    def fill(self, words: NDArray[np.int32]) -> None:
        words[:] = 0
        token_id = self._token_ids[min(self._place, len(self._token_ids) - 1)]
        words.view(np.uint32)[token_id // 32] = 1 << (token_id % 32)

    @property
    def failure(self) -> str | None:
        return None


class TaskMaker:
    """Makes the prompts of each task with the tokenizer and chat template of a model."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self.tasks: dict[str, Callable[[], Iterator[Prompt]]] = {
            "chat": self._chats,
            "tools": self._calls,
            "edit": self._edits,
            "rewrite": self._rewrites,
            "repeat": self._repeats,
        }

    def make(self, task: str, count: int = NUM_PROMPTS) -> list[Prompt]:
        """Return the first `count` prompts of a task."""
        return [prompt for prompt, _ in zip(self.tasks[task](), range(count), strict=False)]

    def _chats(self) -> Iterator[Prompt]:
        for messages, _, answer in _turns("mixed"):
            if "tool_calls" not in answer and len(answer["content"]) >= MIN_CHAT_CHARACTERS:
                yield Prompt(self._open(messages), 64)

    def _calls(self) -> Iterator[Prompt]:
        """Yield prompts in which a tool call has begun; a grammar admits the calls of the tools that are offered."""
        for messages, tools, answer in _turns("errands"):
            if "tool_calls" in answer:
                opened = self._open(messages, tools)
                yield Prompt((*opened, *self._encode(CALL)), 96, grammar=_calls_grammar(tools))

    def _edits(self) -> Iterator[Prompt]:
        for name in NAMES:
            changed = [line for line in FILE.splitlines() if "def sell" in line or "item = self.items[name]" in line]
            block = "\n".join(changed)
            low = f"LOW_STOCK = {10 + len(name)}"
            pairs = ((block, block.replace("def sell", f"def {name}")), ("LOW_STOCK = 10", low))
            wanted = f"Rename the method `sell` to `{name}` and set `{low}`. Answer with search/replace blocks."
            blocks = (f"<<<<<<< SEARCH\n{old}\n=======\n{new}\n>>>>>>> REPLACE\n" for old, new in pairs)
            yield self._replay(wanted, "".join(blocks))

    def _rewrites(self) -> Iterator[Prompt]:
        for name in NAMES:
            wanted = f"Rename the method `sell` to `{name}` and count sales in `self.num_sold`. Write the whole file."
            changed = FILE.replace("def sell", f"def {name}")
            changed = changed.replace("self.items = {}", "self.items = {}\n        self.num_sold = 0")
            changed = changed.replace("item.count -= count", "item.count -= count\n        self.num_sold += count")
            yield self._replay(wanted, f"```python\n{changed}```")

    def _repeats(self) -> Iterator[Prompt]:
        for name in NAMES:
            text = FILE.replace("sell", name).split("\n\n\n")[2]
            wanted = f"Repeat the following text word for word:\n\n{text}"
            yield Prompt(self._open([{"role": "user", "content": wanted}]), 256)

    def _replay(self, wanted: str, answer: str) -> Prompt:
        prompt = self._open([{"role": "user", "content": f"Here is a file:\n```python\n{FILE}```\n{wanted}"}])
        end = self._tokenizer.eos_token_id
        assert isinstance(end, int)
        replayed = (*self._encode(answer), end)
        return Prompt(prompt, len(replayed), replayed)

    def _open(self, messages: list[dict[str, Any]], tools: list[Any] | None = None) -> tuple[int, ...]:
        """Return the tokens of a conversation in which the assistant speaks next."""
        text = self._tokenizer.apply_chat_template(
            messages, tools=tools or None, add_generation_prompt=True, tokenize=False
        )
        assert isinstance(text, str)
        return self._encode(text)

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer(text, add_special_tokens=False).input_ids)


def _turns(style: Style) -> Iterator[tuple[list[dict[str, Any]], list[dict[str, Any]], dict[str, Any]]]:
    """Yield conversations of values never seen in training: the messages so far, the tools, and an assistant turn."""
    source = Source(random.Random(f"speculation {style}"), held_out=True)
    while True:
        dialogue = make_dialogue(source, 500, style)
        turns = [i for i, message in enumerate(dialogue.messages) if message["role"] == "assistant"]
        for index in turns[-2:]:
            yield dialogue.messages[:index], dialogue.tools, dialogue.messages[index]


def _calls_grammar(tools: list[dict[str, Any]]) -> str:
    functions = [tool["function"] for tool in tools]
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": each["name"]}, "arguments": each["parameters"]},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for each in functions
    ]
    return json.dumps({"grammars": [{"json_schema": {"anyOf": calls}}]})
