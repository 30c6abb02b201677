"""What one step has to tell, while it is being collected. Knows nothing but messages."""

from __future__ import annotations

from dataclasses import dataclass, field

from weft.engine.messages import (
    EngineLoad,
    PromptProgress,
    Reserved,
    SealedBlock,
    SequenceFailed,
    StepOutput,
    TokenDelta,
)


@dataclass(slots=True)
class Events:
    """The lists of a StepOutput to be."""

    reserved: list[Reserved] = field(default_factory=list)
    progress: list[PromptProgress] = field(default_factory=list)
    deltas: list[TokenDelta] = field(default_factory=list)
    failures: list[SequenceFailed] = field(default_factory=list)
    sealed: list[SealedBlock] = field(default_factory=list)

    def __bool__(self) -> bool:
        """There is something to tell."""
        return bool(self.reserved or self.progress or self.deltas or self.failures or self.sealed)

    def output(self, load: EngineLoad, step_seconds: float, cache_changes: dict[bytes, bool]) -> StepOutput:
        """The message; these lists are its own from now on."""
        return StepOutput(
            load, self.reserved, self.progress, self.deltas, self.failures, self.sealed, step_seconds, cache_changes
        )
