"""The grammars of a worker's sequences: opened beside the loop, before the engine hears of the sequence."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from weft.engine.history import Constraint
from weft.errors import Incompatible
from weft.grammar import Grammars
from weft.request import Grammar


class GrammarDesk:
    """Loads the tokenizer when the first grammar comes; without one, requests that need masks are refused."""

    def __init__(self, load: Callable[[], Grammars] | None = None) -> None:
        self._load = load
        self._grammars: Grammars | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")

    async def open(self, grammar: Grammar | None) -> Constraint | None:
        """Raises InvalidRequest for what cannot be compiled, Incompatible for another tokenizer than the gateway's."""
        if grammar is None:
            return None
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._open, grammar)

    def close(self) -> None:
        """Forget what has not begun."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _open(self, grammar: Grammar) -> Constraint:
        if self._load is None:
            raise Incompatible("this worker has no tokenizer: WEFT_MODEL must name the model's directory")
        if self._grammars is None:
            self._grammars = self._load()
        if self._grammars.tokenizer_hash != grammar.tokenizer_hash:
            raise Incompatible("the grammar was made for another tokenizer.json than this worker's")
        return self._grammars.compile(grammar.text)
