"""Multi-turn dialogues: facts told early and asked for late, tool calls, talk and echoes in between.

Knows how the pieces of `facts`, `tools`, `invented` and `smalltalk` follow each other. Knows no tokens: sizes are
estimates in characters. `python -m training.weft_nano.dialogues` prints a few.
"""

import argparse
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from training.weft_nano import entities, smalltalk
from training.weft_nano.entities import Source
from training.weft_nano.facts import Fact, make_fact
from training.weft_nano.invented import invent_tool
from training.weft_nano.tools import CATALOGUE, Tool

Message = dict[str, Any]
Style = Literal["mixed", "drill", "errands", "choices", "session"]
CHARACTERS_PER_TOKEN = 2.5


@dataclass(frozen=True, slots=True)
class Probe:
    """An assistant message that can be judged: its index, and the fact or the call it must contain."""

    index: int
    fact: Fact | None = None
    call: dict[str, Any] | None = None


@dataclass(slots=True)
class Dialogue:
    messages: list[Message] = field(default_factory=list)
    tools: list[dict[str, Any]] = field(default_factory=list)
    probes: list[Probe] = field(default_factory=list)


class Talk:
    """A dialogue in the making."""

    def __init__(self, source: Source, target_tokens: int, style: Style) -> None:
        self.s = source
        self.style = style
        self.target_size = target_tokens * CHARACTERS_PER_TOKEN
        self.size = 0.0
        self.dialogue = Dialogue()
        self.tools: list[Tool] = []
        self.unasked: list[Fact] = []
        self.asked: list[Fact] = []
        self.keys_taken: set[str] = set()

    def say(self, role: str, content: str | None, **extra: Any) -> None:
        self.dialogue.messages.append({"role": role, "content": content, **extra})
        self.size += len(content or "") + 12

    def exchange(self, ask: str, answer: str) -> None:
        self.say("user", ask)
        self.say("assistant", answer)

    def open(self) -> None:
        """The system message and the tools."""
        if self.style == "drill":
            return
        if self.style == "choices":
            return self._take_tools(self.s.between(1, 5), invented=0.85)
        prompt = smalltalk.system_prompt(self.s) if self.s.chance(0.7) else ""
        if self.s.chance(0.2):
            facts = [self._new_fact() for _ in range(self.s.between(1, 3))]
            prompt = " ".join([prompt, *(f.statement for f in facts)]).strip()
        if prompt:
            self.say("system", prompt)
        if self.style == "errands":
            self._take_tools(self.s.between(1, 2) if self.target_size < 1000 else self.s.between(1, 5))
        elif self.s.chance(0.6):
            self._take_tools(1 if self.target_size < 700 else self.s.between(1, 5))
        return None

    def _take_tools(self, count: int, invented: float = 0.5) -> None:
        for _ in range(count):
            tool = invent_tool(self.s) if self.s.chance(invented) else self.s.choice(CATALOGUE)
            if all(tool.name != other.name for other in self.tools):
                self.tools.append(tool)
        wrapped = [{"type": "function", "function": tool.schema} for tool in self.tools]
        self.dialogue.tools = wrapped
        self.size += sum(len(json.dumps(tool.schema)) for tool in self.tools) * 0.7

    def _new_fact(self) -> Fact:
        fact = make_fact(self.s, self.keys_taken)
        self.unasked.append(fact)
        return fact

    def tell(self) -> None:
        facts = [self._new_fact() for _ in range(self.s.choice((1, 1, 1, 2, 2, 3, 4)))]
        reply = self.s.choice(smalltalk.ACKNOWLEDGEMENTS)
        if len(facts) == 1 and self.s.chance(0.25):
            reply = f"{self.s.choice(('Got it:', 'Noted:', 'Okay.'))} {facts[0].answer}"
        self.exchange(self._join([f.statement for f in facts]), reply)

    def _join(self, statements: list[str]) -> str:
        first, *others = statements
        if len(others) == 1 and first.endswith(".") and others[0].startswith(("My ", "The ")) and self.s.chance(0.4):
            return f"{first[:-1]} and {others[0][0].lower()}{others[0][1:]}"
        return " ".join(statements)

    def recall(self) -> None:
        if not self.unasked and (not self.asked or self.s.chance(0.7)):
            return self.tell()
        fact = self._pick_fact()
        if self.s.chance(0.06):
            other = self._pick_fact()
            return self.exchange(f"{fact.question} {other.question}", f"{fact.answer} {other.answer}")
        question = fact.question.lower() if self.s.chance(0.03) and fact.question.isascii() else fact.question
        self.exchange(question, fact.answer)
        self.dialogue.probes.append(Probe(len(self.dialogue.messages) - 1, fact=fact))
        return None

    def _pick_fact(self) -> Fact:
        pool = self.unasked if self.unasked and self.s.chance(0.85) else self.asked or self.unasked
        fact = pool.pop(int(self.s.rng.random() * len(pool)))
        self.asked.append(fact)
        return fact

    def lack_a_tool(self) -> None:
        """A request that only a tool could serve, and the tool is not there."""
        tool = self.s.choice(CATALOGUE)
        # What a contact finder is asked sounds just like asking for a fact.
        if tool.name == "find_contact" or any(tool.name == other.name for other in self.tools):
            return self.chat()
        return self.exchange(tool.use(self.s).ask, "I have no tool for that.")

    def use_tool(self) -> None:
        if not self.tools:
            other = self.s.rng.choices((self.chat, self.echo, self.lack_a_tool), (50, 35, 15))[0]
            return other()
        tool = self.s.choice(self.tools)
        use = tool.use(self.s)
        call = {"name": tool.name, "arguments": use.arguments}
        lead = self.s.choice(("Let me check.", "One moment.", "I will do that.")) if self.s.chance(0.08) else None
        self.say("user", use.ask)
        self.say("assistant", lead, tool_calls=[{"type": "function", "function": call}])
        self.dialogue.probes.append(Probe(len(self.dialogue.messages) - 1, call=call))
        self.say("tool", use.result if isinstance(use.result, str) else json.dumps(use.result))
        self.say("assistant", use.answer)
        self.size += len(json.dumps(call)) * 1.2
        return None

    def chat(self) -> None:
        self.exchange(*smalltalk.chat_pair(self.s))

    def echo(self) -> None:
        self.exchange(*smalltalk.echo_pair(self.s))

    def story(self) -> None:
        """A long text from the user, so that distance comes from other things than turns too."""
        room = (self.target_size - self.size) * 0.4
        sentences: list[str] = []
        while sum(map(len, sentences)) < min(room, self.s.between(100, 1200)):
            sentences.append(_story_sentence(self.s))
        opening = self.s.choice(("Here is a story.", "Read this.", "Listen.", "Here are my notes."))
        self.exchange(" ".join([opening, *sentences]), self.s.choice(("Thank you for the text.", "I have read it.")))

    def step(self) -> None:
        progress = self.size / self.target_size
        weights: tuple[int, ...]
        actions: tuple[Callable[[], None], ...] = (
            self.tell, self.recall, self.use_tool, self.chat, self.echo, self.story,
        )  # fmt: skip
        if self.style == "drill":
            weights = (28, 42, 0, 3, 27, 0)
        elif self.style == "errands":
            weights = (14, 22, 56, 6, 2, 0)
        elif self.style == "choices":
            weights = (2, 2, 92, 3, 1, 0)
        elif self.style == "session":
            weights = (1, 0, 0, 0, 0, 0) if not self.keys_taken else (0, 0, 50, 35, 5, 10)
            weights = (0, 1, 0, 0, 0, 0) if progress > 0.75 and self.unasked else weights
        elif progress < 0.3:
            weights = (55, 8, 20, 12, 4, 1)
        elif progress < 0.6:
            weights = (18, 20, 36, 14, 5, 7)
        else:
            weights = (4, 62, 20, 12, 2, 0)
        self.s.rng.choices(actions, weights)[0]()


def _story_sentence(s: Source) -> str:
    who = s.choice((
        f"The {s.choice(entities.COLOURS)} {s.choice(entities.ANIMALS)}", entities.first_name(s),
        f"The {s.choice(entities.JOBS)}",
    ))  # fmt: skip
    did = s.choice(
        "walked to|looked at|talked about|thought of|dreamed of|waited for|left|found|saw|painted|sold|lost".split("|")
    )
    what = s.choice((
        entities.city(s), f"the {s.choice(entities.COLOURS)} house", f"the {s.choice(entities.ANIMALS)}",
        f"{s.between(2, 90)} boxes of {s.choice(entities.FOODS)}",
    ))  # fmt: skip
    when = s.choice((
        f" on {s.choice(entities.DAYS)}", f" in {s.choice(entities.MONTHS)}", "", " again",
        f" at {entities.moment(s)}", " in the evening",
    ))  # fmt: skip
    return f"{who} {did} {what}{when}."


def make_dialogue(source: Source, target_tokens: int, style: Style = "mixed") -> Dialogue:
    """A dialogue of roughly `target_tokens` tokens, system part and tools included.

    A drill is copying only; errands are mostly tool calls; choices are calls among
    tools that are nearly all invented; a session tells one to four facts at its start, goes on
    to other things, and asks for them at its end.
    """
    talk = Talk(source, target_tokens, style)
    talk.open()
    talk.step()
    while talk.size < talk.target_size * 0.93:
        talk.step()
    return talk.dialogue


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--held-out", action="store_true")
    options = parser.parse_args()
    source = Source(random.Random(options.seed), options.held_out)
    for _ in range(options.count):
        dialogue = make_dialogue(source, options.tokens)
        for tool in dialogue.tools:
            print(json.dumps(tool))
        for message in dialogue.messages:
            print(json.dumps(message, ensure_ascii=False))
        print()


if __name__ == "__main__":
    main()
