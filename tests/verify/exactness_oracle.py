"""Laws of speculative decoding on toy vocabularies: exactly, by enumeration, and by sampling with the real noise.

Everything random in a step (draft tokens, coins, the final token) is enumerated while the real verifier, filters and
penalties run; steps are chained until a fixed length is reached, and the law of that text is compared with the law of
plain decoding. What enumeration cannot see, words used twice, is left to `simulate` and a chi-square.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
from scipy import stats

from paceline.interfaces import Verifier
from paceline.params import SamplingParams
from paceline.sampling import filters
from paceline.sampling.noise import DRAFT, SAMPLE, to_uniform, words
from paceline.sampling.processors import PenaltyState, pack_adjustments
from paceline.sampling.race import race
from paceline.types import Draft, DraftLaw, RowSampling
from paceline.verify import chain
from paceline.verify.chain import ChainVerifier

Law = dict[tuple[int, ...], float]  # output tokens -> probability

PARAMS = {
    "plain": SamplingParams(temperature=1.0),
    "greedy": SamplingParams(temperature=0.0),
    "top_k": SamplingParams(temperature=0.8, top_k=2),
    "top_p": SamplingParams(temperature=1.2, top_p=0.7),
    "min_p": SamplingParams(temperature=1.0, min_p=0.3),
    "penalties": SamplingParams(
        temperature=1.0, repetition_penalty=1.7, presence_penalty=0.8, frequency_penalty=0.9, top_p=0.95
    ),
    "bans": SamplingParams(
        temperature=0.9, logit_bias={0: 1.5}, banned_token_ids=(1,), stop_token_ids=(2,), min_tokens=2
    ),
}


@dataclass
class ToyModel:
    """A seeded table of logits, one row for each sequence of tokens, run through the real processors."""

    vocab_size: int
    params: SamplingParams
    seed: int = 0
    prompt: tuple[int, ...] = (0, 1)
    spread: float = 1.5  # standard deviation of the logits
    _cache: dict = field(default_factory=dict)

    def logits(self, tokens: tuple[int, ...]) -> np.ndarray:
        noise = np.random.default_rng([self.seed, *tokens]).standard_normal(self.vocab_size)
        return (self.spread * noise).astype(np.float32)

    def rows(self, output: tuple[int, ...], draft: Draft | None) -> tuple[np.ndarray, RowSampling]:
        """Raw logits [N+1, V] after output and after each node, and how each row is sampled."""
        paths = [output]
        for token, parent in zip(draft.token_ids.tolist(), draft.parents.tolist(), strict=True) if draft else ():
            paths.append((*paths[parent + 1], token))
        state = PenaltyState(self.params, self.prompt, eos_ids=(), vocab_size=self.vocab_size)
        state.append(output)
        count, params = len(paths), self.params
        sampling = RowSampling(
            temperature=np.full(count, params.temperature, np.float32),
            top_k=np.full(count, params.top_k, np.int32),
            top_p=np.full(count, params.top_p, np.float32),
            min_p=np.full(count, params.min_p, np.float32),
            seed=np.zeros(count, np.uint64),
            stream=np.zeros(count, np.uint32),
            position=np.array([len(self.prompt) + len(path) for path in paths], np.uint32),
            purpose=np.full(count, SAMPLE, np.uint32),
            adjustments=pack_adjustments(self.adjust(state, draft, len(output))) if state.active else None,
        )
        return np.stack([self.logits(self.prompt + path) for path in paths]), sampling

    def adjust(self, state: PenaltyState, draft: Draft | None, num_output: int) -> list:
        return state.rows(draft, num_output=num_output)

    def laws(self, output: tuple[int, ...], draft: Draft | None = None) -> np.ndarray:
        """Laws [N+1, V] after output and after each node of the draft."""
        key = (output, None if draft is None else (*draft.token_ids.tolist(), *draft.parents.tolist()))
        if key not in self._cache:
            self._cache[key] = filters.laws(*self.rows(output, draft))
        return self._cache[key]

    def plain_law(self, length: int) -> Law:
        """The law of plain decoding."""
        law: Law = {(): 1.0}
        for _ in range(length):
            law = {(*out, y): w * p for out, w in law.items() for y, p in enumerate(self.laws(out)[0]) if p > 0}
        return law


Drafter = Callable[[tuple[int, ...]], list[tuple[float, Draft]]]  # output -> drafts with their probabilities


def deterministic_chain(length: int, vocab_size: int) -> Drafter:
    """A guess that depends on the output only."""

    def propose(output: tuple[int, ...]) -> list[tuple[float, Draft]]:
        tokens = np.random.default_rng([7, *output]).integers(0, vocab_size, length)
        return [(1.0, Draft.chain(tokens, source="toy"))]

    return propose


def deterministic_tree(vocab_size: int) -> Drafter:
    """Up to five nodes: two children of the root, with two and one children (siblings differ)."""

    def propose(output: tuple[int, ...]) -> list[tuple[float, Draft]]:
        rng = np.random.default_rng([11, *output])
        tokens = [*rng.permutation(vocab_size)[:2], *rng.permutation(vocab_size)[:2], rng.integers(vocab_size)]
        return [(1.0, Draft(np.array(tokens, np.int32), np.array([-1, -1, 0, 0, 1], np.int32), source="toy"))]

    return propose


def sampled_chain(model: ToyModel, length: int, ids: tuple[int, ...] | None = None) -> Drafter:
    """Chains sampled from the laws of a draft model, on its own path; `ids` restricts its vocabulary."""
    columns = np.arange(model.vocab_size) if ids is None else np.array(ids)

    def extend(output: tuple[int, ...], path: tuple[int, ...], laws: list, weight: float) -> Iterator:
        if len(path) == length:
            law = DraftLaw(np.array(laws), None if ids is None else columns)
            yield weight, Draft.chain(list(path), source="toy", law=law)
            return
        # As the engine does, the draft model's rows see the drafted tokens as history.
        law = model.laws(output, Draft.chain(list(path), source="toy"))[-1][columns] + (0.0 if ids is None else 1e-3)
        law = law / law.sum()
        for token, probability in zip(columns.tolist(), law.tolist(), strict=True):
            if probability > 0:
                yield from extend(output, (*path, token), [*laws, law], weight * probability)

    return lambda output: list(extend(output, (), [], 1.0))


class WordNeededError(Exception):
    def __init__(self, key: tuple[int, int, int]) -> None:
        self.key = key


class ScriptedNoise:
    """Noise whose coins and races are written down beforehand; asking for anything else raises WordNeededError."""

    def __init__(self, coins: dict, winner: int | None = None, default: float | None = None) -> None:
        self.coins, self.winner, self.default = coins, winner, default
        self.asked: list[tuple[int, int, int]] = []
        self.raced: tuple[int, int, int] | None = None

    def uniform(self, *, position: int, purpose: int, attempt: int) -> float:
        key = (position, purpose, attempt)
        self.asked.append(key)
        if self.default is not None:
            return self.default
        return self.coins[key]

    def uniforms(self, *, position: int, purpose: int, attempt: int, vocab_size: int) -> np.ndarray:
        self.raced = (position, purpose, attempt)
        assert self.raced not in self.asked, "coin and final token share a word"
        if self.winner is None:
            raise WordNeededError(self.raced)
        uniforms = np.full(vocab_size, 2.0**-33)
        uniforms[self.winner] = 1 - 2.0**-33
        return uniforms


def chain_step(verifier: ChainVerifier, draft: Draft, laws: np.ndarray, position: int) -> Iterator:
    """All outcomes (probability, accepted, final token) of the real verify on one draft, by coins and races."""
    acceptance = np.clip(verifier.acceptance(draft, laws), 0.0, 1.0).tolist()
    dry = ScriptedNoise({}, winner=0, default=2.0**-33)
    verifier.verify(draft, laws, dry, position=position, attempt=3)
    borders = defaultdict(set)  # of each word: the acceptance probabilities it is compared with
    for key, probability in zip(dry.asked, acceptance, strict=True):
        borders[key].add(probability)
    intervals = []
    for cuts in borders.values():
        edges = sorted({0.0, 1.0, *cuts})
        intervals.append(list(itertools.pairwise(edges)))
    for choice in itertools.product(*intervals):
        weight = math.prod(high - low for low, high in choice)
        coins = {key: (low + high) / 2 for key, (low, high) in zip(borders, choice, strict=True)}
        noise = ScriptedNoise(coins)
        try:
            verifier.verify(draft, laws, noise, position=position, attempt=3)
        except WordNeededError as needed:
            accepted = needed.key[0] - position
        for token, probability in enumerate(verifier.final_law(draft, laws, accepted).tolist()):
            if probability > 0:
                noise = ScriptedNoise(coins, winner=token)
                verdict = verifier.verify(draft, laws, noise, position=position, attempt=3)
                assert verdict.path == tuple(range(accepted))
                assert verdict.final_token == token
                assert (verdict.kind == "bonus") == (accepted == len(draft))
                yield weight * probability, accepted, token


def coupled_step(verifier: Verifier, draft: Draft, laws: np.ndarray) -> Iterator:
    """All outcomes (probability, emitted tokens) of `coupled`, by the sampled token of every row."""
    choices = [[(y, p) for y, p in enumerate(law.tolist()) if p > 0] for law in laws]
    for rows in itertools.product(*choices):
        weight = math.prod(p for _, p in rows)
        sampled = np.array([y for y, _ in rows], np.int32)
        verdict = verifier.verify(draft, sampled, ScriptedNoise({}), position=0, attempt=0)
        yield weight, (*(int(draft.token_ids[node]) for node in verdict.path), verdict.final_token)


def speculative_law(verifier: Verifier, target: ToyModel, drafter: Drafter, length: int) -> Law:
    """The law of the first `length` tokens that speculative steps emit."""
    law: Law = {}
    waiting: dict[int, Law] = defaultdict(lambda: defaultdict(float))  # by length reached
    waiting[0][()] = 1.0
    for reached in range(length):
        for output, weight in waiting.pop(reached, {}).items():
            for draft_weight, draft in drafter(output):
                laws = target.laws(output, draft)
                if verifier.needs_laws:
                    position = len(target.prompt) + len(output)
                    steps = (
                        (p, (*draft.token_ids[:accepted].tolist(), token))
                        for p, accepted, token in chain_step(verifier, draft, laws, position)
                    )
                else:
                    steps = coupled_step(verifier, draft, laws)
                for probability, emitted in steps:
                    text = (*output, *emitted)[:length]
                    waiting[len(text)][text] += weight * draft_weight * probability
    law.update(waiting[length])
    return law


def total_variation(a: Law, b: Law) -> float:
    return 0.5 * sum(abs(a.get(key, 0.0) - b.get(key, 0.0)) for key in {*a, *b})


def uniforms_of(seeds: np.ndarray, *, position: int, purpose: int, attempts: np.ndarray, vocab_size: int) -> np.ndarray:
    """What PhiloxNoise(seed, 0).uniforms gives, for many seeds [S] and attempts [S] at once: [S, V]."""
    blocks = np.arange((vocab_size + 3) // 4, dtype=np.uint64)[None]
    purposes = (np.uint64(purpose) | attempts.astype(np.uint64) << np.uint64(3))[:, None]
    drawn = words(blocks, seed=seeds[:, None], stream=0, position=position, purpose=purposes)
    return to_uniform(drawn.reshape(len(seeds), -1)[:, :vocab_size])


def simulate(
    verifier: Verifier,
    target: ToyModel,
    drafting: ToyModel,
    *,
    seeds: np.ndarray,
    num_draft: int,
    length: int,
    fresh: bool = True,
) -> np.ndarray:
    """Texts [S, length] of speculative decoding with the real noise, one for each seed [S] uint64.

    A draft model samples chains of num_draft: with the target's noise under `coupled`, with its own words otherwise.
    Samples in the same state go through the real acceptance, coins and races together. `fresh` = False keeps the
    attempt at 0 in every step.
    """  # fmt: skip
    texts = np.zeros((len(seeds), length), np.int64)
    waiting: dict[int, dict] = defaultdict(lambda: defaultdict(list))  # length -> output -> [(samples, attempts)]
    waiting[0][()].append((np.arange(len(seeds)), np.zeros(len(seeds), np.int64)))
    for reached in range(length):
        for output, parts in waiting.pop(reached, {}).items():
            samples, steps = (np.concatenate(column) for column in zip(*parts, strict=True))
            attempts = steps if fresh else np.zeros_like(steps)
            for emitted, which in _step(verifier, target, drafting, output, seeds[samples], attempts, num_draft):
                text = (*output, *emitted)[:length]
                if len(text) == length:
                    texts[samples[which]] = text
                else:
                    waiting[len(text)][text].append((samples[which], steps[which] + 1))
    return texts


def _step(
    verifier: Verifier, target: ToyModel, drafting: ToyModel, output: tuple[int, ...], seeds: np.ndarray,
    attempts: np.ndarray, num_draft: int,
) -> Iterator[tuple[tuple[int, ...], np.ndarray]]:  # fmt: skip
    """One step of samples that share their output: emitted tokens, and the indices of the samples that emit them."""
    start, vocab_size = len(target.prompt) + len(output), target.vocab_size
    purpose = DRAFT if verifier.needs_laws else SAMPLE

    def draw(law: np.ndarray, which: np.ndarray, offset: int, purpose: int) -> np.ndarray:
        tries = np.zeros_like(attempts) if purpose == SAMPLE else attempts
        u = uniforms_of(
            seeds[which], position=start + offset, purpose=purpose, attempts=tries[which], vocab_size=vocab_size
        )
        return race(law, u)

    groups: list[tuple[tuple[int, ...], list, np.ndarray]] = [((), [], np.arange(len(seeds)))]
    for offset in range(num_draft):
        longer = []
        for path, drafted, which in groups:
            law = drafting.laws(output, Draft.chain(list(path), source="toy"))[-1]
            tokens = draw(law, which, offset, purpose)
            longer += [((*path, int(t)), [*drafted, law], which[tokens == t]) for t in np.unique(tokens)]
        groups = longer
    for path, drafted, which in groups:
        draft = Draft.chain(list(path), source="toy", law=DraftLaw(np.array(drafted)))
        laws = target.laws(output, draft)
        if not verifier.needs_laws:
            rows = np.stack([draw(laws[i], which, i, SAMPLE) for i in range(len(laws))], axis=1)
            codes = rows @ vocab_size ** np.arange(len(laws))
            for code in np.unique(codes):
                who = codes == code
                verdict = verifier.verify(draft, rows[who][0], ScriptedNoise({}), position=start, attempt=0)
                yield (*path[: len(verdict.path)], verdict.final_token), which[who]
            continue
        coins = np.stack(
            [
                uniforms_of(
                    seeds[which], position=start + i, purpose=chain.COIN, attempts=attempts[which], vocab_size=1
                )
                for i in range(num_draft)
            ],
            axis=1,
        )[..., 0]
        accepted = verifier.num_accepted(verifier.acceptance(draft, laws), coins)
        for count in np.unique(accepted).tolist():
            who = which[accepted == count]
            tokens = draw(verifier.final_law(draft, laws, count), who, count, chain.RESIDUAL)
            for token in np.unique(tokens).tolist():
                yield (*path[:count], token), who[tokens == token]


def p_value(texts: np.ndarray, law: Law) -> float:
    """Chi-square of texts [S, length] against the exact law; 0 if a text that cannot occur did."""
    _, first, counts = np.unique(texts @ 16 ** np.arange(texts.shape[1]), return_index=True, return_counts=True)
    observed = {tuple(text): count for text, count in zip(texts[first].tolist(), counts.tolist(), strict=True)}
    if not observed.keys() <= law.keys():
        return 0.0
    likely = {key for key, p in law.items() if p * len(texts) >= 5}
    expected = [law[key] * len(texts) for key in likely]
    seen = [observed.get(key, 0) for key in likely]
    rest = len(texts) - sum(expected)
    if rest >= 5:
        expected.append(rest)
        seen.append(len(texts) - sum(seen))
    scale = sum(seen) / sum(expected)
    return float(stats.chisquare(seen, [value * scale for value in expected]).pvalue)
