"""A growing text against its spelling in one go."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.draft.retokenised_text import RetokenisedText
from piece_tokenizer import PieceTokenizer

OWN = PieceTokenizer([*(bytes([i]) for i in range(256)), b"ab", b"abc", b" b", b" ab", "é".encode(), b"aa", b"aaaa"])


def text_in(tokenizer: PieceTokenizer = OWN, start: list[int] | None = None) -> RetokenisedText:
    return RetokenisedText(tokenizer.encode, tokenizer.token_bytes(), start or [])


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.text("ab cé", max_size=40), st.data())
def test_spelled_in_pieces_or_in_one_go(text, data):
    """No piece of OWN crosses the front of a space, so there is no difference at all."""
    subject, rest = text_in(), text.encode()
    while rest:
        count = data.draw(st.integers(1, 5))
        subject.append(rest[:count])
        rest = rest[count:]
        tokens = subject.tokens()
        known = text.encode()[: len(text.encode()) - len(rest)]
        assert (tokens is None) == (known[-1:] == b"\xc3")
        if tokens is not None:
            assert tokens == OWN.encode(known.decode())


def test_last_tokens_change_as_a_word_grows():
    subject = text_in()
    subject.append(b"c a")
    assert subject.tokens() == OWN.encode("c a")
    subject.append(b"b")
    assert subject.tokens() == [*OWN.encode("c"), OWN.id_of(b" ab")]


def test_special_tokens_end_what_can_change():
    subject = text_in(start=[7])
    subject.append(b"a")
    subject.append_special(0)
    subject.append(b"bc")
    subject.append_special(None)
    subject.append(b"ab")
    assert subject.tokens() == [7, *OWN.encode("a"), 0, *OWN.encode("b"), *OWN.encode("c"), OWN.id_of(b"ab")]


def test_long_words_are_settled_bit_by_bit():
    """Else a text without spaces would be spelled from its beginning at every token."""
    spelled: list[int] = []

    def encode(text: str) -> list[int]:
        spelled.append(len(text.encode()))
        return OWN.encode(text)

    subject = RetokenisedText(encode, OWN.token_bytes(), [])
    text = "é" * 50 + "a" * 1000 + "éab" * 100
    for character in text:
        subject.append(character.encode())
        tokens = subject.tokens()
    assert tokens is not None
    assert b"".join(OWN.token_bytes()[i] or b"" for i in tokens).decode() == text
    assert max(spelled) <= 256 + 2


def test_what_is_no_text_is_read_somehow():
    subject = text_in()
    for byte in b"a\xff\xc3(b":
        subject.append(bytes([byte]))
        tokens = subject.tokens()
    assert tokens is not None
    assert tokens[0] == OWN.id_of(b"a")
    assert tokens[-1] == OWN.id_of(b"b")
