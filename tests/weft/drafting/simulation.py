"""Runs a speculator against answers that are known, with a clock that a function of the rows moves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from weft.engine.drafting.drafter import DecodeStep, DraftOutcome, DraftRequest, Speculator
from weft.engine.drafting.graph_rows import GraphRows
from weft.engine.messages import SequenceMode, SequenceSpec
from weft.engine.sequence import Sequence as EngineSequence
from weft.request import RequestKey, SamplingParams, Speculation

Seconds = Callable[[int], float]  # of a step, by its rows
# Returns the tokens that a sequence gains in a step with these drafts.
Answer = Callable[[EngineSequence, list[int]], list[int]]
EOS = 0


def sequence_of(prompt: Sequence[int], max_tokens: int, prediction: Sequence[int] = ()) -> EngineSequence:
    """Return a sequence at the start of its answer."""
    spec = SequenceSpec(
        RequestKey("request"),
        tuple(prompt),
        SamplingParams(max_tokens),
        SequenceMode.GENERATE,
        speculation=Speculation(prediction=tuple(prediction)),
    )
    return EngineSequence(spec, list(prompt), 0.0)


@dataclass
class Simulation:
    """A batch of sequences and their answers, all of one length.

    - `fill_seconds`: of the draft layer, for each sequence that fills it.
    - `graph_rows`: steps take the time of their padded rows.
    - `seconds`: the simulated time. `plain_seconds`: the time that the same tokens take without a draft model.
    """

    speculator: Speculator
    step_seconds: Seconds
    prompt_row_seconds: float = 0.0
    num_prompt_rows: int = 0
    fill_seconds: float = 0.0
    graph_rows: GraphRows | None = None
    seconds: float = 0.0
    plain_seconds: float = 0.0
    num_steps: int = 0
    num_drafts: int = 0
    num_tokens: int = 0
    rows: list[int] = field(default_factory=list)

    def run(self, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> None:
        """Generate the answers, one beside the other, until the first ends."""
        sequences = [sequence_of(*each) for each in zip(prompts, map(len, answers), strict=True)]
        texts = dict(zip(sequences, answers, strict=True))

        def answer(sequence: EngineSequence, drafts: list[int]) -> list[int]:
            rest = texts[sequence][sequence.num_generated :]
            num_accepted = next((i for i, token in enumerate(drafts) if token != rest[i]), len(drafts))
            return list(rest[: num_accepted + 1])

        while all(sequence.num_generated < len(texts[sequence]) for sequence in sequences):
            self.step(sequences, answer)
        for sequence in sequences:
            self.speculator.forget(sequence)

    def step(self, sequences: Sequence[EngineSequence], answer: Answer) -> None:
        """Run one step."""
        limits = [each.spec.sampling.max_tokens - each.num_generated - 1 for each in sequences]
        for each in sequences:
            each.is_bare = not self.speculator.fills_draft_layer(each)
        requests = [DraftRequest(*each) for each in zip(sequences, limits, strict=True)]
        proposals = self.speculator.propose(requests, self.num_prompt_rows)
        outcomes, context = [], 0
        for sequence, limit, drafts in zip(sequences, limits, proposals, strict=True):
            assert len(drafts) <= limit
            gained = answer(sequence, [draft.token_id for draft in drafts])
            context += (len(drafts) + 1) * len(sequence.token_ids)
            sequence.token_ids += gained
            outcomes.append(DraftOutcome(sequence, drafts, len(gained) - 1, len(gained)))
        num_rows = len(sequences) + sum(map(len, proposals))
        plain = self.step_seconds(len(sequences))
        prompt_seconds = self.prompt_row_seconds * self.num_prompt_rows
        fill_seconds = self.fill_seconds * sum(not each.is_bare for each in sequences)
        step = DecodeStep(outcomes, num_rows, self.num_prompt_rows, context, 0.0)
        padded = step if self.graph_rows is None else self.graph_rows.pad(step)
        seconds = self.step_seconds(padded.num_rows) + prompt_seconds + fill_seconds
        if self.num_prompt_rows:
            seconds = plain + self.prompt_row_seconds * (num_rows - len(sequences)) + prompt_seconds + fill_seconds
        self.speculator.on_step(replace(step, seconds=seconds))
        num_tokens = sum(outcome.num_tokens for outcome in outcomes)
        self.seconds += seconds - prompt_seconds
        self.plain_seconds += plain * num_tokens / len(sequences)
        self.num_steps += 1
        self.num_drafts += num_rows - len(sequences)
        self.num_tokens += num_tokens
        self.rows.append(num_rows)

    @property
    def ratio(self) -> float:
        """How much faster the run was than one without drafts."""
        return self.plain_seconds / self.seconds
