"""Whether speculation left the ids of plain decoding as they are; where it did not, how close the call was."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.bench.runner import submit
from paceline.bench.workload import Prompt
from paceline.params import SamplingParams
from paceline.types import RequestOutput

if TYPE_CHECKING:
    from paceline.llm import LLM

TIE_MARGIN = 1e-3  # in log: where rounding depends on a pass's shape, closer race scores than this may swap


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first place where two outputs of one prompt differ."""

    prompt_id: str
    position: int  # index among the output tokens
    plain_token: int | None  # None: that output had ended
    speculative_token: int | None
    margin: float  # log gap of the two best race scores (of the logits, when greedy) there
    tie: bool  # a floating-point tie: rounding decides, not the drafter. The native engine, equal to the bit, has none


@dataclass(frozen=True, slots=True)
class Equality:
    """What `paceline verify` found."""

    prompts: int
    tokens: int  # of the plain outputs
    divergences: tuple[Divergence, ...]
    lossless: bool

    @property
    def identical(self) -> int:
        return self.prompts - len(self.divergences)

    @property
    def ties(self) -> int:
        return sum(divergence.tie for divergence in self.divergences)

    @property
    def holds(self) -> bool:
        """All ids agree but for floating-point ties."""
        return len(self.divergences) == self.ties


def compare(
    llm: LLM,
    prompts: Sequence[Prompt],
    *,
    params: SamplingParams,
    batch_size: int = 1,
    advance: Callable[[], None] = lambda: None,
) -> Equality:
    """Generates each prompt plainly and speculatively, batch_size at once; `advance` is called after each prompt.

    Both runs need the same seed: params.seed must be set.
    """
    tokens = 0
    divergences = []
    for prompt, plain, speculative in pairs(llm, prompts, params=params, batch_size=batch_size):
        tokens += len(plain.token_ids)
        divergence = find_divergence(llm, prompt, plain, speculative, params)
        if divergence is not None:
            divergences.append(divergence)
        advance()
    return Equality(len(prompts), tokens, tuple(divergences), llm.lossless)


def pairs(
    llm: LLM, prompts: Sequence[Prompt], *, params: SamplingParams, batch_size: int
) -> Iterator[tuple[Prompt, RequestOutput, RequestOutput]]:
    """Each prompt with its plain and its speculative output, batch_size at once."""
    assert params.seed is not None, "two random seeds would be compared"
    for start in range(0, len(prompts), batch_size):
        batch = prompts[start : start + batch_size]
        plain = submit(llm, batch, params, mode="plain")
        speculative = submit(llm, batch, params, mode="speculative")
        yield from zip(batch, plain, speculative, strict=True)


def find_divergence(
    llm: LLM, prompt: Prompt, plain: RequestOutput, speculative: RequestOutput, params: SamplingParams
) -> Divergence | None:
    """The first place where the ids of two outputs differ, with its margin; None if they are the same."""
    ours, theirs = plain.token_ids, speculative.token_ids
    if ours == theirs:
        return None
    shared = min(len(ours), len(theirs))
    position = next((i for i in range(shared) if ours[i] != theirs[i]), shared)
    margin = margin_at(llm, plain, params, position=position)
    return Divergence(
        prompt_id=prompt.id,
        position=position,
        plain_token=ours[position] if position < len(ours) else None,
        speculative_token=theirs[position] if position < len(theirs) else None,
        margin=margin,
        tie=is_tie(llm, margin),
    )


def margin_at(llm: LLM, output: RequestOutput, params: SamplingParams, *, position: int) -> float:
    """How close the target's choice was at the place of an output token."""
    known = [*output.prompt_token_ids, *output.token_ids[:position]]
    return llm.race_margin(known, params, prompt_length=len(output.prompt_token_ids), seed=output.seed)


def is_tie(llm: LLM, margin: float) -> bool:
    """Whether rounding may decide between two candidates so close."""
    return llm.config.engine != "native" and margin < TIE_MARGIN
