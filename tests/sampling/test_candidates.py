"""Candidates against the race written out in full."""

import numpy as np
import pytest
from test_sampler import FILTERS, rows, scores, some_logits

from paceline.sampling.candidates import candidates
from paceline.sampling.sampler import sample_rows
from paceline.types import TokenMap


@pytest.mark.parametrize("filters", FILTERS)
def test_candidates_are_the_best_scores(filters):
    logits = some_logits(30)
    sampling = rows(30, **filters, num_candidates=6)
    output = sample_rows(logits, sampling)
    assert output.candidates is not None
    assert output.candidate_scores is not None
    np.testing.assert_array_equal(output.candidates[:, 0], output.token_ids)
    for i in range(30):
        greedy = filters.get("temperature") == 0
        all_scores = logits[i].astype(float) if greedy else scores(logits, sampling, i)
        best = np.argsort(-all_scores, kind="stable")[:6]
        best = best[all_scores[best] > -np.inf]
        assert output.candidates[i, : len(best)].tolist() == best.tolist()
        assert (output.candidates[i, len(best) :] == -1).all()
        assert (output.candidate_scores[i, len(best) :] == -np.inf).all()
        found = output.candidate_scores[i, : len(best)]  # up to a constant of the row
        np.testing.assert_allclose(found - found[0], all_scores[best] - all_scores[best[0]], rtol=1e-5, atol=1e-5)


def test_scores_that_cannot_be_told_from_zero_are_no_candidates():
    logits = np.array([[0, -1, -200, -300]], np.float32)
    ids, log_scores = candidates(logits, rows(1, num_candidates=4))
    assert sorted(ids[0, :2].tolist()) == [0, 1]
    assert ids[0, 2:].tolist() == [-1, -1]
    assert np.isfinite(log_scores[0, :2]).all()
    assert candidates(logits, rows(1, temperature=0.0, num_candidates=9))[0].tolist() == [[0, 1, 2, 3]]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_tokens_are_sampled_in_the_ids_of_a_map(temperature):
    """As if the model had the other vocabulary, and -inf for all that it does not know."""
    logits = some_logits(20, vocab_size=50)
    ids = np.full(50, -1, np.int32)
    ids[10:40] = np.random.default_rng(2).permutation(80)[:30]
    other = np.full((20, 80), -np.inf, np.float32)
    other[:, ids[10:40]] = logits[:, 10:40]
    options = {"temperature": temperature, "num_logprobs": 2, "num_successors": 2, "num_candidates": 3}
    expected = sample_rows(other, rows(20, **options, want_laws=True))
    mapped = sample_rows(logits, rows(20, **options, want_laws=True, want_logits=True, token_map=TokenMap(ids, 80)))
    for name in ("token_ids", "laws", "successors", "candidates", "candidate_scores"):
        np.testing.assert_array_equal(getattr(mapped, name), getattr(expected, name))
    np.testing.assert_array_equal(mapped.logits, logits)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_mapped_row_may_have_no_token(temperature):
    allowed = np.array([[0xFF], [0b100]], np.uint8)
    token_map = TokenMap(np.array([0, 1, -1], np.int32), 4)
    sampling = rows(2, temperature=temperature, allowed=allowed, token_map=token_map, num_candidates=2)
    output = sample_rows(some_logits(2, vocab_size=3), sampling)
    assert output.token_ids is not None
    assert output.candidates is not None
    assert output.token_ids[0] in (0, 1)
    assert output.token_ids[1] == -1
    assert output.candidates[1].tolist() == [-1, -1]
