"""Cost model of a worker: step times and capacity. `source` names the origin of the numbers.

seconds of a step = base + sequence * B + kv_token * tokens they hold + prompt_token * chunk + pair * chunk * context
                    + (step_beside + token_beside * chunk) * other workers at work on the same machine
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Machine:
    """Seconds of a step by its content. `kv_tokens`: pool size. `chunk_tokens`: prompt tokens per step."""

    name: str
    base: float
    sequence: float
    kv_token: float
    prompt_token: float
    pair: float
    chunk_tokens: int
    kv_tokens: int
    handoff: float
    handoff_token: float
    store_token: float
    dollars_per_hour: float
    source: str
    step_beside: float = 0.0
    token_beside: float = 0.0

    @property
    def is_shared(self) -> bool:
        """True if workers on this machine slow one another down."""
        return self.step_beside > 0.0 or self.token_beside > 0.0

    def step(
        self, sequences: int, held_tokens: float, chunk: float = 0.0, context: float = 0.0, others: int = 0
    ) -> float:
        """Return the seconds of one engine step with `others` busy workers on the machine."""
        return (
            self.base
            + self.sequence * sequences
            + self.kv_token * held_tokens
            + (self.prompt_token + self.pair * context) * chunk
            + (self.step_beside + self.token_beside * chunk) * others
        )

    def prefill(self, tokens: int, cached: int) -> float:
        """Return the seconds of a prompt alone on the machine, with `tokens` to compute after `cached` ones."""
        chunk = min(tokens, self.chunk_tokens)
        return tokens / chunk * self.step(0, 0.0, chunk, cached + tokens / 2)


def roofline(name: str, source: str, gpus: int = 1, dollars_per_hour: float = 3.0) -> Machine:
    """An 8B Llama with grouped-query attention in BF16 on H100s, from data-sheet figures at usual efficiencies.

    8.0e9 weights, 32 layers, 8 KV heads of 128; 989 TFLOP/s at 50 %, 3.35 TB/s at 70 %, 80 GB, 400 Gb/s network at
    70 %.
    """
    weights, layers, width, kv_bytes = 8.0e9, 32, 4096, 131_072
    flops, bandwidth, network = 989e12 * 0.5 * gpus, 3.35e12 * 0.7 * gpus, 50e9 * 0.7
    return Machine(
        name=name,
        base=2 * weights / bandwidth + 0.001,
        sequence=2 * weights / flops,
        kv_token=kv_bytes / bandwidth,
        prompt_token=2 * weights / flops,
        pair=4 * layers * width / flops,
        chunk_tokens=2048,
        kv_tokens=int((80e9 * 0.9 * gpus - 2 * weights) / kv_bytes),
        handoff=0.005,
        handoff_token=kv_bytes / network / 4,  # three quarters are sent while the rest is computed
        store_token=kv_bytes / network,
        dollars_per_hour=dollars_per_hour * gpus,
        source=source,
    )


H100 = roofline("h100-8b", "data sheet, not measured")


def load_machine(name: str) -> Machine:
    """Return the machine of this name, or of a JSON file with the fields of `Machine`."""
    if name == H100.name:
        return H100
    return Machine(**json.loads(Path(name).read_text()))
