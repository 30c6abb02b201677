"""vLLM's CPU build in the speculation benchmark: its engine in this process, compiled, stepped by us, greedy.

Runs in an environment of its own (`loadtest/engine/peers.sh vllm VENV`) and answers prompts over a Unix socket, one at
a time; `loadtest.speculation.peer_vllm` starts it. Standard library and vLLM only.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Listener
from typing import Any

MAX_TOKENS = 2048
CLOCKS = {"wall": time.perf_counter, "cpu": time.thread_time}


class Replay:
    """Replaces the logits of a model that answers one prompt, so that it writes a given text.

    vLLM cannot force tokens and speculate at once. Each row of a step stands behind the tokens so far and the drafts
    before it; rows behind a wrong draft are dropped, so their logits do not matter.
    - `place`: tokens of the answer so far. `num_rows`, `num_steps`: rows with logits and steps since they were reset.
    """

    def __init__(self, model: Any) -> None:
        self.text: Sequence[int] = ()
        self.place = self.num_rows = self.num_steps = 0
        self._compute = model.compute_logits
        model.compute_logits = self._logits

    def _logits(self, hidden_states: Any, *rest: Any) -> Any:
        logits = self._compute(hidden_states, *rest)
        self.num_rows += len(logits)
        self.num_steps += 1
        if self.text:
            ends = [min(self.place + row, len(self.text) - 1) for row in range(len(logits))]
            logits.fill_(-1e4)
            logits[range(len(logits)), [self.text[end] for end in ends]] = 0.0
        return logits


class Driver:
    """An engine for one sequence at a time. `speculative`: vLLM's `speculative_config`, None for none."""

    def __init__(self, model: str, dtype: str, speculative: dict[str, Any] | None, clock: Callable[[], float]) -> None:
        from vllm import EngineArgs, LLMEngine

        self._clock = clock
        arguments = EngineArgs(
            model=model,
            dtype=dtype,
            max_model_len=MAX_TOKENS,
            max_num_seqs=1,
            max_num_batched_tokens=MAX_TOKENS,
            disable_log_stats=True,
            async_scheduling=False,
            speculative_config=speculative,
        )
        self._engine: Any = LLMEngine.from_engine_args(arguments)
        core = self._engine.engine_core.engine_core
        self._replay = Replay(core.model_executor.driver_worker.worker.model_runner.model)
        self._num_requests = 0

    def answer(self, prompt: Mapping[str, Any]) -> dict[str, Any]:
        """Answer one prompt. Seconds, steps and rows start with the first token."""
        engine, replay = self._engine, self._replay
        replay.text, replay.place = prompt["replayed"] or (), 0
        self._num_requests += 1
        engine.add_request(
            f"request-{self._num_requests}", {"prompt_token_ids": prompt["token_ids"]}, _sampling(prompt)
        )
        tokens: list[int] = []
        started = ended = 0.0
        while engine.has_unfinished_requests():
            outputs = engine.step()
            ended = self._clock()
            if outputs:
                if not tokens:
                    started, replay.num_rows, replay.num_steps = ended, 0, 0
                tokens = list(outputs[0].outputs[0].token_ids)
                replay.place = len(tokens)
        return {"seconds": ended - started, "tokens": tokens, "steps": replay.num_steps, "rows": replay.num_rows}


def _sampling(prompt: Mapping[str, Any]) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    schema = prompt["json_schema"]
    structured = None if schema is None else StructuredOutputsParams(json=schema)
    return SamplingParams(
        temperature=0, max_tokens=prompt["max_tokens"], detokenize=False, structured_outputs=structured
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--speculative", type=json.loads, help="vLLM's speculative_config")
    parser.add_argument("--clock", choices=CLOCKS, required=True)
    parser.add_argument("--socket", required=True, help="appears once the engine can answer")
    options = parser.parse_args()
    driver = Driver(options.model, options.dtype, options.speculative, CLOCKS[options.clock])
    with Listener(options.socket, "AF_UNIX") as listener, listener.accept() as connection:
        while True:
            try:
                prompt = json.loads(connection.recv_bytes())
            except EOFError:
                return
            try:
                answer = driver.answer(prompt)
            except Exception as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            connection.send_bytes(json.dumps(answer).encode())


if __name__ == "__main__":
    main()
