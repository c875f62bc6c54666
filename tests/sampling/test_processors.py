"""Penalties, bias and bans against a slow and obvious computation, and against transformers."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.params import SamplingParams
from paceline.sampling.processors import PenaltyState, adjusted_row, allowed_mask, pack_adjustments
from paceline.types import Adjustments, Draft, RowSampling

V = 12


def adjust(logits, adjustments=None, allowed=None):
    """Every row of logits after its adjustments."""
    count = len(logits)
    zeros = np.zeros(count)
    sampling = RowSampling(zeros, zeros, zeros, zeros, zeros, zeros, zeros, zeros, adjustments, allowed)
    return np.stack([adjusted_row(logits, sampling, i) for i in range(count)])


def slow(logits, params, prompt, output, endings):
    """One row, token by token, straight from the definitions."""
    z = logits.astype(np.float64)
    for t in range(len(z)):
        z[t] += params.logit_bias.get(t, 0.0)
        if t in params.banned_token_ids or (t in endings and len(output) < params.min_tokens):
            z[t] = -np.inf
        if t in prompt or t in output:
            z[t] = z[t] / params.repetition_penalty if z[t] > 0 else z[t] * params.repetition_penalty
        z[t] -= params.frequency_penalty * output.count(t)
        z[t] -= params.presence_penalty * (t in output)
    return z


tokens = st.lists(st.integers(0, V - 1), max_size=8)
random_params = st.builds(
    SamplingParams,
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.8]),
    presence_penalty=st.sampled_from([0.0, 0.7, -0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.4]),
    logit_bias=st.dictionaries(st.integers(0, V - 1), st.sampled_from([-2.0, 5.0]), max_size=3),
    banned_token_ids=st.lists(st.integers(0, V - 1), max_size=2).map(tuple),
    stop_token_ids=st.lists(st.integers(0, V - 1), max_size=2).map(tuple),
    min_tokens=st.integers(0, 6),
)


@st.composite
def trees(draw):
    count = draw(st.integers(0, 6))
    parents = [draw(st.integers(-1, i - 1)) for i in range(count)]
    ids = [draw(st.integers(0, V - 1)) for _ in range(count)]
    return Draft(np.array(ids, np.int32), np.array(parents, np.int32), source="test")


@settings(max_examples=150, deadline=None)
@given(random_params, tokens, st.lists(tokens, max_size=3), st.none() | trees(), st.integers(0, 99))
def test_each_row_sees_the_history_of_its_own_path(params, prompt, steps, draft, seed):
    state = PenaltyState(params, prompt, eos_ids=(3, V + 5), vocab_size=V)
    output = []
    for step in steps:
        if state.active:
            state.append(step)
        output += step
    paths = [output]
    for token, parent in zip(draft.token_ids, draft.parents, strict=True) if draft else ():
        paths.append([*paths[parent + 1], int(token)])
    logits = np.random.default_rng(seed).standard_normal((len(paths), V)).astype(np.float32) * 3
    before = logits.copy()
    adjustments = None
    if state.active:
        rows = state.rows(draft, num_output=len(output))
        assert all(len(set(row.ids.tolist())) == len(row.ids) for row in rows)
        adjustments = pack_adjustments(rows)
    got = adjust(logits, adjustments)
    expected = [slow(z, params, prompt, p, (3, *params.stop_token_ids)) for z, p in zip(logits, paths, strict=True)]
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(logits, before)


def test_plain_parameters_cost_nothing():
    assert not PenaltyState(SamplingParams(), [1, 2], eos_ids=(0,), vocab_size=V).active
    state = PenaltyState(SamplingParams(min_tokens=2), [1, 2], eos_ids=(0,), vocab_size=V)
    assert state.active
    state.append([4, 5])
    assert not state.active


def test_rows_without_adjustments_stay_as_they_are():
    state = PenaltyState(SamplingParams(logit_bias={2: 1.0}), [1], eos_ids=(), vocab_size=V)
    packed = pack_adjustments([None, *state.rows(None, num_output=0), None])
    assert packed.offsets.tolist() == [0, 0, 1, 1]
    logits = np.zeros((3, V), np.float32)
    assert np.argwhere(adjust(logits, packed)).tolist() == [[1, 2]]
    assert pack_adjustments([None]).offsets.tolist() == [0, 0]


def test_allowed_mask_keeps_only_its_tokens():
    assert allowed_mask(SamplingParams(), vocab_size=V) is None
    mask = allowed_mask(SamplingParams(allowed_token_ids=(0, 7, 8, 11)), vocab_size=V)
    assert mask.tolist() == [0b10000001, 0b1001]
    kept = adjust(np.ones((1, V), np.float32), allowed=mask[None])
    assert np.flatnonzero(kept[0] == 1).tolist() == [0, 7, 8, 11]
    assert np.isneginf(kept[0][[1, 9]]).all()


def test_repetition_penalty_is_that_of_transformers():
    torch = pytest.importorskip("torch")
    process = pytest.importorskip("transformers").RepetitionPenaltyLogitsProcessor(penalty=1.7)
    logits = np.random.default_rng(1).standard_normal((1, V)).astype(np.float32)
    state = PenaltyState(SamplingParams(repetition_penalty=1.7), [1, 4, 4], eos_ids=(), vocab_size=V)
    state.append([6])
    expected = process(torch.tensor([[1, 4, 4, 6]]), torch.from_numpy(logits)).numpy()
    np.testing.assert_allclose(adjust(logits, pack_adjustments(state.rows(None, num_output=1))), expected, rtol=1e-6)


def test_order_is_bias_then_scale_then_penalty():
    one = np.ones(1, np.float32)
    changes = Adjustments(np.array([0, 1], np.int32), np.array([2], np.int32), 3 * one, 2 * one, 0.5 * one)
    assert adjust(np.full((1, V), -1, np.float32), changes)[0, 2] == (-1 + 3) / 2 - 0.5
    assert adjust(np.full((1, V), -5, np.float32), changes)[0, 2] == (-5 + 3) * 2 - 0.5
