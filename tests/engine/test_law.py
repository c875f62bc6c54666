"""The law of what the real engine writes: a chi-square test over three tokens, of 2e5 samples in the slow runs.

Enumeration with ideal coins cannot see a word of noise that is used twice across steps. This can, and the mutation at
the end shows it.
"""

from __future__ import annotations

import itertools
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import cache, partial
from multiprocessing import get_context

import numpy as np
import pytest
from scipy.stats import chisquare

from paceline.draft import draft_pass
from paceline.draft.draft_model import DraftModelDrafter
from paceline.params import SamplingParams
from paceline.sampling import noise
from paceline.sampling.filters import laws
from paceline.testing import ToyModel
from paceline.types import RowSampling
from toy_engine import CharTokenizer, make_engine

TOKENIZER = CharTokenizer("a")  # beginning, end, "a": a vocabulary of three
PROMPT = (2, 0)
LENGTH = 3  # tokens whose joint law is tested; the one before them comes with the prompt's pass, without a draft
CHOICES = 100  # samples of one request
NUM_PROCESSES = 2
PARAMS = SamplingParams(temperature=1.0, max_tokens=2 * LENGTH, ignore_eos=True, n=CHOICES)


def toy(*, drift: float = 0.0) -> ToyModel:
    return ToyModel(
        vocab_size=3, seed=3, order=4, peakedness=1.2, drift=drift, max_model_len=8, num_blocks=600, block_size=2
    )


def target_law() -> np.ndarray:
    """Probability of each run of three tokens after the prompt and one more token: [27], from the model's own laws."""
    law = np.zeros((3,) * LENGTH)
    for first, *run in itertools.product(range(3), repeat=1 + LENGTH):
        tokens = (first, *run)
        law[tuple(run)] += np.prod([row_law((*PROMPT, *tokens[:i]))[token] for i, token in enumerate(tokens)])
    return law.ravel()


@cache
def row_law(history: tuple[int, ...]) -> np.ndarray:
    logits = toy()._draw(history[-4:], drifts=())[None]
    one = np.ones(1, dtype=np.float32)
    zero = np.zeros(1, dtype=np.uint32)
    plain = RowSampling(one, zero.astype(np.int32), one, one * 0, zero.astype(np.uint64), zero, zero, zero)
    return laws(logits, plain)[0]


def p_value(rule: str, num_samples: int, *, reuse_words: bool = False) -> float:
    """Of the hypothesis that the engine's outputs follow the target's law."""
    starts = np.array_split(np.arange(0, num_samples, CHOICES), NUM_PROCESSES)
    worker = partial(count_outputs, rule, reuse_words=reuse_words)
    with ProcessPoolExecutor(NUM_PROCESSES, mp_context=get_context("spawn")) as pool:  # forking would copy held locks
        counts = sum(pool.map(worker, starts), Counter())
    observed = [counts[run] for run in itertools.product(range(3), repeat=LENGTH)]
    assert sum(observed) == num_samples
    return float(chisquare(observed, target_law() * num_samples).pvalue)


def count_outputs(rule: str, starts: np.ndarray, *, reuse_words: bool) -> Counter[tuple[int, ...]]:
    """Outputs of the requests with these seeds; a worker, so that reuse_words changes its own process alone."""
    if reuse_words:
        honest = noise.purpose_word
        noise.purpose_word = draft_pass.purpose_word = lambda purpose, attempt=0: honest(purpose, 0)
    engine = make_engine(
        drafter=DraftModelDrafter(toy(drift=1.5), rule_needs_law=rule != "coupled"),
        rule=rule,
        num_draft_tokens=LENGTH,
        runner=toy(),
        tokenizer=TOKENIZER,
        max_num_seqs=CHOICES,
        max_num_batched_tokens=8 * CHOICES,
    )
    counts: Counter[tuple[int, ...]] = Counter()
    for seed in starts.tolist():
        request_id = engine.add_request(PROMPT, replace(PARAMS, seed=seed))
        sequences = engine.requests[request_id].sequences
        while min(sequence.num_output for sequence in sequences) < 1 + LENGTH:
            engine.step()
        counts.update(tuple(sequence.output_ids()[1 : 1 + LENGTH].tolist()) for sequence in sequences)
        engine.abort(request_id)
    return counts


SAMPLES = pytest.mark.parametrize("num_samples", [30_000, pytest.param(200_000, marks=pytest.mark.slow)])


@SAMPLES
@pytest.mark.parametrize("rule", ["coupled", "rejection", "block"])
def test_the_engine_writes_the_targets_law(rule: str, num_samples: int) -> None:
    assert p_value(rule, num_samples) > 1e-4


@SAMPLES
def test_words_reused_across_steps_are_caught(num_samples: int) -> None:
    assert p_value("block", num_samples, reuse_words=True) < 1e-12
