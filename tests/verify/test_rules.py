"""What each rule does with one draft."""

import numpy as np
import pytest

from paceline.errors import ConfigError
from paceline.sampling.noise import PhiloxNoise
from paceline.types import Draft, DraftLaw
from paceline.verify import create


def rule(name):
    return create(name, epsilon=0.3, alpha=0.09)


def verify(name, draft, rows, seed=0):
    return rule(name).verify(draft, np.asarray(rows), PhiloxNoise(seed, 0), position=4, attempt=0)


def tree(token_ids, parents):
    return Draft(np.array(token_ids, np.int32), np.array(parents, np.int32), source="test")


def test_flags():
    flags = {n: (rule(n).lossless, rule(n).needs_laws, rule(n).chains_only) for n in _RULES}
    assert flags == _RULES


_RULES = {
    "coupled": (True, False, False),
    "rejection": (True, True, True),
    "block": (True, True, True),
    "typical": (False, True, True),
}


def test_unknown_rule_lists_the_rules():
    with pytest.raises(ConfigError, match="coupled, rejection, block, typical; got 'magic'"):
        rule("magic")


@pytest.mark.parametrize(
    ("rows", "path", "final", "kind"),
    [
        ([9, 0, 0, 0, 0, 0], (), 9, "recovered"),
        ([5, 9, 0, 0, 0, 0], (0,), 9, "recovered"),
        ([6, 0, 5, 0, 0, 0], (1,), 5, "recovered"),
        ([6, 0, 8, 0, 0, 3], (1, 4), 3, "bonus"),
        ([5, 8, 0, 0, 2, 0], (0, 3), 2, "bonus"),
    ],
)
def test_coupled_walks_the_tree(rows, path, final, kind):
    #  5 -> (7, 8); 6 -> 8
    verdict = verify("coupled", tree([5, 6, 7, 8, 8], [-1, -1, 0, 0, 1]), rows)
    assert (verdict.path, verdict.final_token, verdict.kind) == (path, final, kind)


@pytest.mark.parametrize("name", _RULES)
def test_an_empty_draft_is_plain_decoding(name):
    rows = [2] if name == "coupled" else [[0.0, 0.0, 1.0]]
    verdict = verify(name, Draft.chain([], source="test"), rows)
    assert (verdict.path, verdict.final_token, verdict.kind) == ((), 2, "bonus")


@pytest.mark.parametrize("name", ["rejection", "block", "typical"])
@pytest.mark.parametrize("law", [None, DraftLaw(np.eye(3)[[1, 2]])])
def test_greedy_laws_accept_what_greedy_decoding_says(name, law):
    laws = np.eye(3)[[1, 0, 2]]
    verdict = verify(name, Draft.chain([1, 2], source="test", law=law), laws)
    assert (verdict.path, verdict.final_token, verdict.kind) == ((0,), 0, "recovered")


@pytest.mark.parametrize("name", ["rejection", "block"])
def test_equal_laws_accept_everything_and_leave_no_residual(name):
    law = np.array([0.2, 0.3, 0.5])
    draft = Draft.chain([2, 0], source="test", law=DraftLaw(np.stack([law, law])))
    laws = np.stack([law, law, law])
    for seed in range(20):
        assert verify(name, draft, laws, seed).path == (0, 1)
    # A rejection could only come from rounding; what is left to say is p itself.
    np.testing.assert_array_equal(rule(name).final_law(draft, laws, 0), law)


@pytest.mark.parametrize("name", ["rejection", "block"])
def test_long_products_of_tiny_probabilities_stay_exact(name):
    tiny = np.array([1e-200, 1 - 1e-200])
    draft = Draft.chain([0, 0, 0], source="test", law=DraftLaw(np.stack([tiny] * 3)))
    acceptance = rule(name).acceptance(draft, np.stack([tiny] * 4))
    np.testing.assert_array_equal(acceptance, 1.0)


@pytest.mark.parametrize("name", ["rejection", "block"])
def test_coins_and_final_token_are_fresh_in_each_attempt(name):
    laws = np.array([[0.5, 0.5]] * 3)
    draft = Draft.chain([0, 0], source="test", law=DraftLaw(np.array([[0.9, 0.1]] * 2)))
    outcomes = [rule(name).verify(draft, laws, PhiloxNoise(1, 0), position=4, attempt=attempt) for attempt in range(40)]
    assert len({(v.path, v.final_token) for v in outcomes}) > 3


def test_typical_accepts_above_the_entropy_threshold():
    flat = np.full(4, 0.25)  # exp(-H) = 1/4: threshold 0.0225
    peaked = np.array([0.97, 0.01, 0.01, 0.01])  # threshold 0.09 * exp(-0.168) = 0.076
    draft = Draft.chain([3, 1], source="test")
    verdict = verify("typical", draft, [flat, peaked, flat])
    assert (verdict.path, verdict.kind) == ((0,), "recovered")
    assert verdict.final_token == 0  # the tokens below the threshold cannot be drawn
    assert verify("typical", draft, [flat, flat, flat]).path == (0, 1)


@pytest.mark.parametrize("name", ["rejection", "block"])
@pytest.mark.parametrize("law", [DraftLaw(np.array([[1.0, 0.0]])), DraftLaw(np.array([[1.0]]), np.array([0]))])
def test_a_token_that_its_own_law_excludes_is_a_bug_of_the_drafter(name, law):
    with pytest.raises(AssertionError, match="broken drafted a token"):
        verify(name, Draft.chain([1], source="broken", law=law), [[0.5, 0.5]] * 2)
