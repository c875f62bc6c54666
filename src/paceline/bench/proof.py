"""All that can be checked of a model, a drafter and a rule by running them: the checks of `paceline verify --proof`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from paceline.bench.equality import Divergence, find_divergence, is_tie, margin_at, pairs
from paceline.bench.runner import MODES, submit
from paceline.bench.two_sample import p_value
from paceline.bench.workload import Prompt
from paceline.config import SpeculationConfig
from paceline.params import SamplingParams
from paceline.types import SpeculationMetrics

if TYPE_CHECKING:
    from paceline.llm import LLM

LAW_RULES = ("rejection", "block")  # which keep the law of a text, not its ids, where anything is sampled
_LAW_TOKENS = 4  # of each sampled text: several steps, and few enough for texts to come again
_LAW_PROMPTS = 4  # hundreds of texts of each
_LEAST_P = 1e-3  # of two samples: right rules fail one check in two thousand
_MISSED_BY_ROUNDING = 0.1  # of the drafted tokens: far more than happens, far less than a wrong position makes
_CHOICES = 100  # of one request
_TEMPERATURE = 0.8  # where the user's is 0


@dataclass(frozen=True, slots=True)
class Check:
    """One question and its answer."""

    name: str
    holds: bool | None  # None: nothing was drafted, so that nothing was tested
    found: str  # a sentence with the figures
    prompts: int
    divergences: tuple[Divergence, ...] | None = None  # where ids are compared


class Proving:
    """The checks that a model, its drafter and its rule call for, on some prompts. model: as `llm` was made with it."""

    def __init__(
        self,
        model: str,
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

            rule = SpeculationConfig(method="draft_model", model=self._model)
            with LLM(llm, config=replace(llm.config, speculation=rule), progress=False) as twin:
                for params in (self._greedy, self._sampled):
                    checks.append(own_draft(twin, prompts, params=params, batch_size=batch_size, advance=advance))
        return checks


def same_ids(
    llm: LLM, prompts: Sequence[Prompt], *, params: SamplingParams, batch_size: int, advance: Callable[[], None]
) -> list[Check]:
    """Plain and speculative ids agree; and each token is what the target samples when the output is fed to it."""
    tokens, metrics = 0, SpeculationMetrics()
    divergences: list[Divergence] = []
    wrong: list[str] = []
    ties: list[float] = []
    for prompt, plain, speculative in pairs(llm, prompts, params=params, batch_size=batch_size):
        tokens += len(speculative.token_ids)
        metrics += speculative.metrics
        divergence = find_divergence(llm, prompt, plain, speculative, params)
        if divergence is not None:
            divergences.append(divergence)
        choices = llm.forced_tokens(speculative, params)
        for position, (own, choice) in enumerate(zip(speculative.token_ids, choices, strict=True)):
            if own == choice:
                continue
            margin = margin_at(llm, speculative, params, position=position)
            if not is_tie(llm, margin):
                wrong.append(prompt.id)
                break  # what follows was written after a wrong token
            ties.append(margin)
        advance()
    differing = [divergence.prompt_id for divergence in divergences if not divergence.tie]
    ties += [divergence.margin for divergence in divergences if divergence.tie]
    drafted = metrics.num_draft_tokens > 0
    by_rounding = f"; {len(ties)} ties by rounding, margin up to {max(ties):.1e}" if ties else ""
    same = (
        f"{len(prompts) - len(differing)} of {len(prompts)} prompts, {tokens} tokens, {_drafted(metrics)}{by_rounding}"
    )
    forced = f"{len(prompts) - len(wrong)} of {len(prompts)} outputs, each fed to the target in one pass"
    return [
        Check(
            f"same ids as plain decoding, {_how(params)}",
            not differing if drafted or differing else None,
            f"{same}{_named(differing)}",
            len(prompts),
            tuple(divergences),
        ),
        Check(
            f"each token is the target's own choice, {_how(params)}",
            not wrong,
            f"{forced}{_named(wrong)}",
            len(prompts),
        ),
    ]


def same_law(
    llm: LLM, prompts: Sequence[Prompt], *, params: SamplingParams, samples: int, advance: Callable[[], None]
) -> Check:
    """Plain and speculative texts come from one law: many of each, a few tokens long, from seeds of their own."""
    assert params.seed is not None
    length = min(_LAW_TOKENS, params.max_tokens)
    texts: dict[str, list[np.ndarray]] = {mode: [] for mode in MODES}
    metrics = SpeculationMetrics()
    for index, prompt in enumerate(prompts):
        for offset, mode in enumerate(MODES):
            rows = np.full((samples, length), -1, dtype=np.int32)
            for start in range(0, samples, _CHOICES):
                # No two requests share their random words: equal ones would move together
                seed = (params.seed + ((index * samples + start) << 1) + offset) % 2**64
                own = replace(params, n=min(_CHOICES, samples - start), max_tokens=length, seed=seed)
                [output] = submit(llm, [prompt], own, mode=mode)
                metrics += output.metrics
                for row, choice in zip(rows[start:], output.outputs, strict=False):
                    row[: len(choice.token_ids)] = choice.token_ids
            texts[mode].append(rows)
        advance()
    p = p_value(texts["plain"], texts["speculative"])
    return Check(
        f"same law as plain decoding, {_how(params)}",
        p >= _LEAST_P if metrics.num_draft_tokens else None,
        f"two-sample chi-square over {samples} texts of {length} tokens each way for each of {len(prompts)} prompts, "
        f"{_drafted(metrics)}: p = {p:.4f}, to be at least {_LEAST_P:g}",
        len(prompts),
    )


def own_draft(
    llm: LLM, prompts: Sequence[Prompt], *, params: SamplingParams, batch_size: int, advance: Callable[[], None]
) -> Check:
    """A target that drafts for itself is always right, where nothing but rounding tells its passes apart.

    What it does not accept of its own drafts is rounding, or an error in positions, masks or the cache: a drafter has
    no part in it. On the native engine nothing may be missed, on torch no more than rounding explains.
    """
    metrics, missed, failed = SpeculationMetrics(), 0, []
    native = llm.config.engine == "native"
    for prompt, plain, speculative in pairs(llm, prompts, params=params, batch_size=batch_size):
        own = speculative.metrics
        metrics += own
        divergence = find_divergence(llm, prompt, plain, speculative, params)
        # The token that ends an output counts as the step's own, though it was drafted
        own_missed = max(0, own.num_draft_tokens - own.num_accepted_tokens - 1)
        missed += own_missed
        if (divergence is not None and not divergence.tie) or (native and own_missed):
            failed.append(prompt.id)
        advance()
    few = missed <= _MISSED_BY_ROUNDING * metrics.num_draft_tokens
    return Check(
        f"the target accepts its own drafts, {_how(params)}",
        not failed and few if metrics.num_draft_tokens else None,
        f"{_drafted(metrics)}, and up to one that ends each of {len(prompts)} outputs{_named(failed)}",
        len(prompts),
    )


def _drafted(metrics: SpeculationMetrics) -> str:
    return f"{metrics.num_accepted_tokens} of {metrics.num_draft_tokens} drafted tokens accepted"


def _how(params: SamplingParams) -> str:
    return "greedy" if params.greedy else f"temperature {params.temperature:g}"


def _named(prompt_ids: Sequence[str]) -> str:
    """At most three of them."""
    names = list(dict.fromkeys(prompt_ids))
    return f"; not {', '.join(names[:3])}{' and others' if len(names) > 3 else ''}" if names else ""
