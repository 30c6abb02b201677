"""One streamed completion in a thread of its own, and what came of it; transformers says what must have come."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Any

import httpx
import orjson

from tests.mesh.conftest import Mesh
from tests.mesh.oracle import unlikely

PATIENCE_SECONDS = 150.0


@dataclass
class Stream:
    """`num_attempts`: starts on a worker, as the gateway tells them at the end."""

    mesh: Mesh
    prompt: list[int]
    num_tokens: int
    session: str = ""
    tokens: list[int] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)
    errors: list[Any] = field(default_factory=list)
    refusal: int = 0  # the status, when it was never placed
    num_attempts: int = 0
    moments: list[tuple[str, float]] = field(default_factory=list)
    leaves: threading.Event = field(default_factory=threading.Event)

    def read(self) -> None:
        """To its end, or until it is to leave."""
        self._mark("asked")
        try:
            self._read()
        finally:
            self._mark("over")

    def _read(self) -> None:
        body = {"model": "weft-nano", "prompt": self.prompt, "max_tokens": self.num_tokens, "stream": True}
        body |= {"ignore_eos": True, "temperature": 0, "return_token_ids": True, "session_id": self.session}
        url, headers = f"{self.mesh.url}/v1/completions", {"x-weft-timeline": "1"}
        with httpx.stream("POST", url, json=body, headers=headers, timeout=PATIENCE_SECONDS) as response:
            if response.status_code != 200:
                self.refusal = response.status_code
                return
            for line in response.iter_lines():
                if self.leaves.is_set():
                    return
                if line.startswith("data: "):
                    self._take(line.removeprefix("data: "))

    def _take(self, data: str) -> None:
        if data == "[DONE]":
            self.ends.append(data)
            return
        frame = orjson.loads(data)
        if "error" in frame:
            self.errors.append(frame["error"])
        if "num_attempts" in frame:
            self.num_attempts = frame["num_attempts"]
        if frame.get("choices"):
            self._mark("last frame" if self.tokens else "first frame")
        for choice in frame.get("choices", ()):
            self.tokens += choice.get("token_ids") or []
            if choice["finish_reason"]:
                self.ends.append(choice["finish_reason"])

    def _mark(self, what: str) -> None:
        """The latest of its kind stays."""
        self.moments = [each for each in self.moments if each[0] != what] + [(what, time.time())]

    def told(self) -> str:
        """What has become of it, for whoever has to find out why."""
        began = self.moments[0][1] if self.moments else 0.0
        clock = time.strftime("%H:%M:%S", time.localtime(began))
        times = ", ".join(f"{what} +{at - began:.2f} s" for what, at in self.moments[1:])
        return (
            f"{len(self.prompt)} tokens, {len(self.tokens)} of {self.num_tokens} came, asked at {clock}, {times}; "
            f"status {self.refusal or 200}, attempts {self.num_attempts}, ends {self.ends}, errors {self.errors}"
        )

    def expect_right(self, may_be_refused: bool = False) -> None:
        """All tokens, and one end; or one status that says to come again, where nobody could take it just then."""
        if may_be_refused and self.refusal:
            assert self.refusal in (429, 503)
            return
        assert (self.refusal, self.errors) == (0, [])
        assert len(self.tokens) == self.num_tokens
        wrong = unlikely(self.prompt, self.tokens)
        assert not wrong, f"{self.told()}; places of wrong tokens, and by how much: {wrong}"
        assert self.ends == ["length", "[DONE]"]
