"""All that can be checked of a model, a drafter and a rule by running them: the checks of `paceline verify --proof`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from paceline.bench.equality import find_divergence, is_tie, pairs
from paceline.bench.runner import MODES, submit
from paceline.bench.two_sample import p_value
from paceline.bench.workload import Prompt
from paceline.config import SpeculationConfig
from paceline.params import SamplingParams
from paceline.types import SpeculationMetrics

if TYPE_CHECKING:
    from paceline.llm import LLM
    from paceline.models.loader import LoadedModel

LAW_RULES = ("rejection", "block")  # which keep the law of a text, not its ids, where anything is sampled
LAW_TOKENS = 4  # of each sampled text: several steps, and few enough for texts to come again
_LAW_PROMPTS = 4  # hundreds of texts of each
_LEAST_P = 1e-3  # of two samples: right rules fail one check in a thousand
_CHOICES = 100  # of one request
_TEMPERATURE = 0.8  # where the user's is 0


@dataclass(frozen=True, slots=True)
class Check:
    """One question and its answer."""

    name: str
    holds: bool
    found: str  # a sentence with the figures


class Proving:
    """The checks that a model, its drafter and its rule call for, on some prompts."""

    def __init__(
        self,
        model: LoadedModel,
        llm: LLM,
        prompts: Sequence[Prompt],
        *,
        params: SamplingParams,
        samples: int,
        batch_size: int,
    ) -> None:
        self._model, self._llm, self._prompts = model, llm, prompts
        self._by_law = llm.config.speculation.verification in LAW_RULES
        self._greedy = replace(params, temperature=0.0)
        self._sampled = replace(params, temperature=params.temperature or _TEMPERATURE)
        self._samples = samples
        self._batch_size = batch_size

    def num_rounds(self, *, thorough: bool) -> int:
        """How often `run` will call `advance`."""
        count = len(self._prompts)
        return (min(count, _LAW_PROMPTS) if self._by_law else count) + (3 * count if thorough else 0)

    def run(self, advance: Callable[[], None], *, thorough: bool) -> list[Check]:
        """thorough: greedy, too, and the target drafting for itself; otherwise only what the temperature calls for."""
        llm, prompts, batch_size = self._llm, self._prompts, self._batch_size
        checks = []
        if thorough:
            checks += same_ids(llm, prompts, params=self._greedy, batch_size=batch_size, advance=advance)
        if self._by_law:
            few = prompts[:_LAW_PROMPTS]
            checks.append(same_law(llm, few, params=self._sampled, samples=self._samples, advance=advance))
        else:
            checks += same_ids(llm, prompts, params=self._sampled, batch_size=batch_size, advance=advance)
        if thorough:
            from paceline.llm import LLM

            rule = SpeculationConfig(method="draft_model", model=self._model.name)
            with LLM(self._model, config=replace(llm.config, speculation=rule), progress=False) as twin:
                for params in (self._greedy, self._sampled):
                    checks.append(own_draft(twin, prompts, params=params, batch_size=batch_size, advance=advance))
        return checks


def same_ids(
    llm: LLM, prompts: Sequence[Prompt], *, params: SamplingParams, batch_size: int, advance: Callable[[], None]
) -> list[Check]:
    """Plain and speculative ids agree; and each token is what the target samples when the output is fed to it."""
    tokens, forced_tokens, how = 0, 0, _how(params)
    differing, wrong, margins = [], [], []
    for prompt, plain, speculative in pairs(llm, prompts, params=params, batch_size=batch_size):
        tokens += len(plain.token_ids)
        divergence = find_divergence(llm, prompt, plain, speculative, params)
        if divergence is not None:
            margins.append(divergence.margin)
            if not divergence.tie:
                differing.append(prompt.id)
        choices = llm.forced_tokens(speculative, params)
        for at, (own, choice) in enumerate(zip(speculative.token_ids, choices, strict=True)):
            forced_tokens += 1
            if own == choice:
                continue
            known = [*speculative.prompt_token_ids, *speculative.token_ids[:at]]
            margin = llm.race_margin(
                known, params, prompt_length=len(speculative.prompt_token_ids), seed=speculative.seed
            )
            margins.append(margin)
            if not is_tie(llm, margin):
                wrong.append(prompt.id)
        advance()
    ties = f"; ties by rounding, margin up to {max(margins):.1e}" if margins else ""
    return [
        Check(
            f"same ids as plain decoding, {how}",
            not differing,
            f"{len(prompts) - len(differing)} of {len(prompts)} prompts, {tokens} tokens{ties}{_named(differing)}",
        ),
        Check(
            f"each token is the target's own choice, {how}",
            not wrong,
            f"{forced_tokens - len(wrong)} of {forced_tokens} tokens, each output fed to the target in one pass"
            f"{_named(wrong)}",
        ),
    ]


def same_law(
    llm: LLM, prompts: Sequence[Prompt], *, params: SamplingParams, samples: int, advance: Callable[[], None]
) -> Check:
    """Plain and speculative texts come from one law: many of each, a few tokens long, from seeds of their own."""
    assert params.seed is not None
    texts: dict[str, list[np.ndarray]] = {mode: [] for mode in MODES}
    for prompt in prompts:
        for offset, mode in enumerate(MODES):
            rows = np.full((samples, LAW_TOKENS), -1, dtype=np.int32)
            for start in range(0, samples, _CHOICES):
                count = min(_CHOICES, samples - start)
                seed = (params.seed + 2 * start + offset) % 2**64  # of either mode its own
                own = replace(params, n=count, max_tokens=LAW_TOKENS, seed=seed)
                [output] = submit(llm, [prompt], own, mode=mode)
                for row, choice in zip(rows[start:], output.outputs, strict=False):
                    row[: len(choice.token_ids)] = choice.token_ids
            texts[mode].append(rows)
        advance()
    p = p_value(texts["plain"], texts["speculative"])
    return Check(
        f"same law as plain decoding, {_how(params)}",
        p >= _LEAST_P,
        f"two-sample chi-square over {samples} texts of {LAW_TOKENS} tokens each way for each of {len(prompts)} "
        f"prompts: p = {p:.4f}, to be at least {_LEAST_P:g}",
    )


def own_draft(
    llm: LLM, prompts: Sequence[Prompt], *, params: SamplingParams, batch_size: int, advance: Callable[[], None]
) -> Check:
    """A target that drafts for itself is always right, where nothing but rounding tells its passes apart.

    What it does not accept of its own drafts is rounding, or an error in positions, masks or the cache: a drafter has
    no part in it.
    """
    metrics, failed = SpeculationMetrics(), []
    for prompt, plain, speculative in pairs(llm, prompts, params=params, batch_size=batch_size):
        metrics += speculative.metrics
        divergence = find_divergence(llm, prompt, plain, speculative, params)
        # The token that ends an output counts as the step's own, though it was drafted
        missed = speculative.metrics.num_draft_tokens - speculative.metrics.num_accepted_tokens - 1
        if (divergence is not None and not divergence.tie) or (llm.config.engine == "native" and missed > 0):
            failed.append(prompt.id)
        advance()
    return Check(
        f"the target accepts its own drafts, {_how(params)}",
        not failed and metrics.num_draft_tokens > 0,
        f"{metrics.num_accepted_tokens} of {metrics.num_draft_tokens} drafted tokens, and up to one that ends each of "
        f"{len(prompts)} outputs{_named(failed)}",
    )


def _how(params: SamplingParams) -> str:
    return "greedy" if params.greedy else f"temperature {params.temperature:g}"


def _named(prompt_ids: Sequence[str]) -> str:
    """At most three of them."""
    names = list(dict.fromkeys(prompt_ids))
    return f"; not {', '.join(names[:3])}{' and others' if len(names) > 3 else ''}" if names else ""
