"""A worker with both roles that can replay an answer: it takes a grammar of single tokens as the text to write.

A small model cannot edit a file. With a replayed answer it takes the steps of a model that can: each row samples the
next token of the answer, and drafts are verified whether they are right or wrong. Other grammars work as always.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import grpc

from loadtest.speculation.tasks import ReplayedText
from weft.engine.messages import Constraint
from weft.request import Grammar
from weft.worker.engine_client import EngineClient, GrammarCompiler
from weft.worker.process import RoleService, WorkerContext, run_worker
from weft_services.decode.service import DECODE_ROLE
from weft_services.prefill.service import PREFILL_ROLE

TOKENS = re.compile(r"start:((?: <\[\d+\]>)+)")


def replay_grammar(token_ids: Iterable[int]) -> str:
    """Return the grammar that makes a worker of this module write these tokens; the last one ends the answer."""
    return "start:" + "".join(f" <[{token_id}]>" for token_id in token_ids)


def replayed_ids(grammar: str) -> tuple[int, ...]:
    """Return the tokens to replay, from a grammar as the gateway passes it on; empty for any other grammar."""
    for part in json.loads(grammar)["grammars"]:
        if found := TOKENS.fullmatch(part.get("lark_grammar", "")):
            return tuple(map(int, re.findall(r"\d+", found[1])))
    return ()


class ReplayCompiler(GrammarCompiler):
    """Compiles by another compiler, which it does not close, all but answers to replay."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        super().__init__()
        self._compiler = compiler

    async def compile(self, grammar: Grammar | None, with_twins: bool) -> Constraint | None:
        if grammar is not None and (token_ids := replayed_ids(grammar.text)):
            return ReplayedText(token_ids)
        return await self._compiler.compile(grammar, with_twins)


def replaying(role: RoleService) -> RoleService:
    """Return the role of a worker that replays."""

    def install(context: WorkerContext, server: grpc.aio.Server) -> EngineClient[Any]:
        return role.install(replace(context, grammars=ReplayCompiler(context.grammars)), server)

    return replace(role, install=install)


if __name__ == "__main__":
    run_worker("replay", replaying(PREFILL_ROLE), replaying(DECODE_ROLE))
