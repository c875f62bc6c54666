"""Incremental text: whole characters, stop strings across token boundaries, nothing shown that is taken back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.engine.detokenizer import Detokenizer


class Bytes:
    """A tokenizer whose tokens are single bytes: every character beyond ASCII spans several tokens."""

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        return bytes(ids).decode("utf-8", errors="replace")


def feed(text: bytes, stop: tuple[str, ...] = ()) -> tuple[list[str], Detokenizer, str | None]:
    detokenizer = Detokenizer(Bytes(), skip_special_tokens=True, stop=stop)
    shown = []
    for byte in text:
        found = detokenizer.append([byte])
        if found is not None:
            return [*shown, detokenizer.take()], detokenizer, found
        shown.append(detokenizer.take())
    detokenizer.close()
    return [*shown, detokenizer.take()], detokenizer, None


@given(st.text())
def test_pieces_add_up_to_the_text_and_never_show_half_a_character(text: str) -> None:
    shown, detokenizer, _ = feed(text.encode())
    assert "".join(shown) == detokenizer.text == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in shown)


@given(st.text(alphabet="ab€", max_size=12), st.lists(st.text(alphabet="ab€", min_size=1, max_size=3), max_size=3))
def test_stop_strings_end_the_text_where_a_search_of_the_whole_would(text: str, stop: list[str]) -> None:
    shown, detokenizer, found = feed(text.encode(), tuple(stop))
    ends = {s: text.find(s) + len(s) for s in stop if s in text}
    if not ends:
        assert found is None
        assert detokenizer.text == text
    else:  # the string that is complete first ends the output; of several complete at once, the one that starts first
        first_end = min(ends.values())
        starts = [first_end - len(s) for s, end in ends.items() if end == first_end]
        assert detokenizer.text == text[: min(starts)]
    assert "".join(shown) == detokenizer.text


@given(st.lists(st.text(alphabet="a€é", max_size=3)))
def test_tokens_of_a_step_may_come_together(steps: list[str]) -> None:
    detokenizer = Detokenizer(Bytes(), skip_special_tokens=True)
    shown = ""
    for step in steps:
        detokenizer.append(list(step.encode()))
        shown += detokenizer.take()
    detokenizer.close()
    assert shown + detokenizer.take() == detokenizer.text == "".join(steps)


def test_incomplete_tail_is_shown_as_it_decodes() -> None:
    shown, detokenizer, _ = feed("né".encode()[:-1])
    assert detokenizer.text == "n\ufffd"
    assert shown == ["n", "", "\ufffd"]


@pytest.mark.parametrize("text", [b"\xff\xffab", b"\xe2\x82ab"])
def test_invalid_bytes_do_not_stall(text: bytes) -> None:
    _, detokenizer, _ = feed(text)
    assert detokenizer.text == text.decode(errors="replace")


def test_may_stop_is_heeded() -> None:
    detokenizer = Detokenizer(Bytes(), skip_special_tokens=True, stop=("b",))
    assert detokenizer.append([ord("a")], may_stop=False) is None
    assert detokenizer.append([ord("b")], may_stop=False) is None
    assert detokenizer.append([ord("b")], may_stop=True) == "b"
    assert detokenizer.text == "ab"
