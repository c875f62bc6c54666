"""Which tokens of two vocabularies are the same."""

from __future__ import annotations

from paceline.draft.vocabulary_map import coverage, map_tokens, special_pairs
from piece_tokenizer import PieceTokenizer

TARGET = PieceTokenizer([b"a", b"b", b"ab", b"<pad>", b"\xc3"], specials=["<s>", "<eos>", "<tool>"])
OWN = PieceTokenizer([b"b", b"ba", b"\xc3", b"a", b"<s>"], specials=["<eos>", "<tool>", "<pad>", "<only>"])


def test_tokens_of_equal_bytes_are_the_same():
    mapped = map_tokens(TARGET, OWN, target_size=10, own_size=12)
    assert mapped.size == 10
    names = {OWN.token_text(i): TARGET.token_text(t) for i, t in enumerate(mapped.ids[:9].tolist()) if t >= 0}
    assert names == {"<eos>": "<eos>", "b": "b", "a": "a", "�": "�"}
    assert mapped.ids[9:].tolist() == [-1, -1, -1]  # rows that only pad the embedding


def test_special_tokens_have_no_counterpart_by_accident():
    """<tool> is special in both, <pad> and <s> in one; only <eos> ends both's texts."""
    mapped = map_tokens(TARGET, OWN, target_size=8, own_size=9)
    assert mapped.ids[:4].tolist() == [1, -1, -1, -1]
    assert mapped.ids[8] == -1
    other_end = PieceTokenizer([b"a"], specials=["<eos>", "<s>"], eos="<s>")
    assert map_tokens(TARGET, other_end, target_size=8, own_size=3).ids.tolist() == [-1, -1, 3]


def test_special_tokens_are_read_by_their_names():
    assert special_pairs(TARGET, OWN) == {0: 1, 1: 2}


def test_coverage_counts_the_targets_tokens():
    mapped = map_tokens(TARGET, OWN, target_size=8, own_size=9)
    assert coverage("ababaaab", TARGET, mapped) == 2 / 5  # ab ab a a ab
