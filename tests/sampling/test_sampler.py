"""The row sampler against the race written out in full."""

import numpy as np
import pytest
from scipy import stats

from paceline.errors import ConfigError
from paceline.sampling.filters import laws
from paceline.sampling.noise import PhiloxNoise, purpose_word
from paceline.sampling.processors import RowAdjustments, pack_adjustments
from paceline.sampling.sampler import race_margin, raw_logprobs, sample_rows
from paceline.types import RowSampling

FILTERS = [
    {}, {"temperature": 0.0}, {"temperature": 0.4}, {"top_k": 1}, {"top_k": 20}, {"top_p": 0.6}, {"min_p": 0.1},
    {"temperature": 1.5, "top_k": 300, "top_p": 0.9, "min_p": 0.001},
]  # fmt: skip


def rows(count, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=None, attempt=0, purpose=0, **more):
    return RowSampling(
        temperature=np.full(count, temperature, np.float32),
        top_k=np.full(count, top_k, np.int32),
        top_p=np.full(count, top_p, np.float32),
        min_p=np.full(count, min_p, np.float32),
        seed=np.arange(2**63, 2**63 + count, dtype=np.uint64) if seed is None else np.full(count, seed, np.uint64),
        stream=np.arange(count, dtype=np.uint32) % 3,
        position=np.arange(10, 10 + count, dtype=np.uint32),
        purpose=np.full(count, purpose_word(purpose, attempt), np.uint32),
        **more,
    )


def some_logits(count, vocab_size=3000, spread=3.0, seed=0):
    return (np.random.default_rng(seed).standard_normal((count, vocab_size)) * spread).astype(np.float32)


def scores(logits, sampling, i, *, purpose=0, attempt=0):
    """Log race scores of every token of a row."""
    noise = PhiloxNoise(int(sampling.seed[i]), int(sampling.stream[i]))
    u = noise.uniforms(position=int(sampling.position[i]), purpose=purpose, attempt=attempt, vocab_size=logits.shape[1])
    with np.errstate(divide="ignore"):
        return np.log(laws(logits, sampling)[i]) - np.log(-np.log(u))


@pytest.mark.parametrize("filters", FILTERS)
def test_the_token_wins_the_race_over_the_processed_logits(filters):
    logits = some_logits(40)
    sampling = rows(40, **filters)
    before = logits.copy()
    expected = [int(np.argmax(scores(logits, sampling, i))) for i in range(40)]
    assert sample_rows(logits, sampling).token_ids.tolist() == expected
    np.testing.assert_array_equal(logits, before)


def test_a_drafters_purpose_and_attempt_reach_the_words():
    logits = some_logits(20, spread=1.0)
    sampling = rows(20, purpose=1, attempt=6)
    expected = [int(np.argmax(scores(logits, sampling, i, purpose=1, attempt=6))) for i in range(20)]
    assert sample_rows(logits, sampling).token_ids.tolist() == expected
    assert sample_rows(logits, rows(20, purpose=1, attempt=7)).token_ids.tolist() != expected


@pytest.mark.parametrize("filters", FILTERS)
def test_a_row_does_not_depend_on_the_other_rows(filters):
    logits = some_logits(9)
    bias = pack_adjustments([None, *[_bias({3: 4.0, 5: -np.inf})] * 8])
    together = sample_rows(logits, rows(9, **filters, adjustments=bias, want_laws=True, num_logprobs=3))
    whole = rows(9, **filters)
    for i in range(9):
        alone = RowSampling(
            *(getattr(whole, name)[i : i + 1] for name in list(RowSampling.__dataclass_fields__)[:8]),
            adjustments=pack_adjustments([None if i == 0 else _bias({3: 4.0, 5: -np.inf})]),
            want_laws=True,
            num_logprobs=3,
        )
        single = sample_rows(logits[i : i + 1].copy(), alone)
        assert single.token_ids[0] == together.token_ids[i]
        np.testing.assert_array_equal(single.laws[0], together.laws[i])
        np.testing.assert_array_equal(single.logprobs.token[0], together.logprobs.token[i])


def _bias(biases):
    count = len(biases)
    ids, values = np.array(list(biases), np.int32), np.array(list(biases.values()), np.float32)
    return RowAdjustments(ids, values, np.ones(count, np.float32), np.zeros(count, np.float32))


@pytest.mark.parametrize("filters", [{}, {"top_k": 3}, {"top_p": 0.8}])
def test_tokens_follow_the_law(filters):
    count = 4000
    logits = np.repeat(some_logits(1, vocab_size=6, spread=1.0), count, axis=0)
    sampling = rows(count, **filters)
    law = laws(logits[:1], rows(1, **filters))[0]
    counts = np.bincount(sample_rows(logits, sampling).token_ids, minlength=6)
    assert counts[law == 0].sum() == 0
    assert stats.chisquare(counts[law > 0], law[law > 0] * count).pvalue > 1e-4


def test_greedy_and_sampled_rows_share_a_pass_and_ties_go_to_the_lowest_id():
    logits = np.zeros((2, 8), np.float32)
    sampling = rows(2)
    sampling.temperature[0] = 0
    assert sample_rows(logits, sampling).token_ids[0] == 0
    assert sample_rows(logits, rows(2, temperature=0.0)).token_ids.tolist() == [0, 0]


def test_logits_and_laws_come_only_where_asked():
    logits = some_logits(2)
    plain = sample_rows(logits, rows(2))
    assert (plain.logits, plain.laws, plain.logprobs) == (None, None, None)
    asked = sample_rows(logits, rows(2, want_logits=True, want_laws=True, top_k=5))
    np.testing.assert_array_equal(asked.logits, logits)
    assert (np.count_nonzero(asked.laws, axis=1) == 5).all()
    np.testing.assert_allclose(asked.laws.sum(axis=1), 1.0, rtol=1e-12)


def test_banning_every_token_is_an_error():
    with pytest.raises(ConfigError, match="every token is banned"):
        sample_rows(some_logits(1, 8), rows(1, temperature=0.0, allowed=np.zeros((1, 1), np.uint8)))


def test_logprobs_are_raw_and_ranked():
    logits = np.array([[1.0, 3.0, 3.0, 0.0], [5.0, 1.0, 2.0, 2.0]], np.float32)
    bans = pack_adjustments([_bias({1: -np.inf})] * 2)
    wanted = np.array([-1, 3], np.int32)
    output = sample_rows(logits, rows(2, temperature=0.0, adjustments=bans, num_logprobs=3, logprob_ids=wanted))
    assert output.token_ids.tolist() == [2, 0]
    expected = logits - np.log(np.exp(logits.astype(np.float64)).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(output.logprobs.token, [expected[0, 2], expected[1, 3]], rtol=1e-6)
    assert output.logprobs.rank.tolist() == [1, 2]  # ties count as not ahead
    assert output.logprobs.top_ids.tolist() == [[1, 2, 0], [0, 2, 3]]
    np.testing.assert_allclose(output.logprobs.top[1], expected[1, [0, 2, 3]], rtol=1e-6)
    assert raw_logprobs(logits, output.token_ids, num_logprobs=0).top_ids.shape == (2, 0)


def test_successors_are_the_best_raw_tokens():
    logits = np.array([[1.0, 3.0, 3.0, 0.0], [5.0, 1.0, 2.0, 2.0]], np.float32)
    bans = pack_adjustments([_bias({1: -np.inf})] * 2)
    output = sample_rows(logits, rows(2, adjustments=bans, num_successors=3))
    assert output.successors.tolist() == [[1, 2, 0], [0, 2, 3]]
    assert output.successors.dtype == np.int32
    assert sample_rows(logits, rows(2, num_successors=9)).successors.shape == (2, 4)
    assert sample_rows(logits, rows(2)).successors is None


@pytest.mark.parametrize("filters", FILTERS)
def test_race_margin_is_the_gap_between_the_best_two(filters):
    logits = some_logits(5)
    for i in range(5):
        sampling = rows(5, **filters)
        alone = RowSampling(*(getattr(sampling, n)[i : i + 1] for n in list(RowSampling.__dataclass_fields__)[:8]))
        values = logits[i].astype(float) if filters.get("temperature") == 0 else scores(logits, sampling, i)
        second, best = np.sort(values)[-2:]
        assert race_margin(logits[i], alone) == pytest.approx(best - second, abs=1e-9)
