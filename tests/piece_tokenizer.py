"""A tokenizer of a few pieces of text, so that two of them can share some tokens and not others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class PieceTokenizer:
    """Spells a text with the longest pieces that fit, from its start; what no piece fits is left out.

    Pieces are bytes, and need not be whole characters. The special tokens come before them.
    """

    has_chat_template = False

    def __init__(self, pieces: Sequence[bytes], *, specials: Sequence[str] = ("<eos>",), eos: str = "<eos>") -> None:
        self._specials = list(specials)
        self._pieces = list(pieces)
        self.special_ids = frozenset(range(len(specials)))
        self.eos_ids = frozenset({self._specials.index(eos)})
        self.vocab_size = len(specials) + len(pieces)
        self._longest_first = sorted(pieces, key=len, reverse=True)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        ids, rest = [], text.encode()
        while rest:
            piece = next((piece for piece in self._longest_first if rest.startswith(piece)), None)
            if piece is not None:
                ids.append(self.id_of(piece))
            rest = rest[len(piece or b"?") :]
        return ids

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        return b"".join(self.token_bytes()[i] or b"" for i in ids).decode("utf-8", "replace")

    def token_text(self, token_id: int) -> str:
        return [*self._specials, *(piece.decode("utf-8", "replace") for piece in self._pieces)][token_id]

    def token_bytes(self) -> list[bytes | None]:
        return [*[None] * len(self._specials), *self._pieces]

    def id_of(self, piece: bytes) -> int:
        return len(self._specials) + self._pieces.index(piece)
