"""FixedLength."""

from paceline.control.policy import FixedLength


def test_every_request_drafts_the_same_within_its_limit():
    assert FixedLength(5).plan([], []) == []
    assert FixedLength(5).plan([None] * 4, [0, 3, 5, 9]) == [0, 3, 5, 5]
