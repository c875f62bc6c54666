"""A draft model with another vocabulary than the target's: it reads the text in its own tokens and drafts in both's."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from paceline.draft.retokenised_text import RetokenisedText
from paceline.draft.vocabulary_map import SAMPLE_TEXT, coverage, map_tokens, special_pairs
from paceline.errors import DraftMismatchError
from paceline.interfaces import Tokenizer
from paceline.types import RequestView, TokenMap

_LEAST_COVERAGE = 0.5


@dataclass(slots=True)
class _Text:
    """A request's text as the draft model reads it."""

    own: RetokenisedText
    num_read: int = 0  # known tokens of the target that are in it
    word: list[int] = field(default_factory=list)  # the target's tokens since the last that began with a space


class CrossVocabulary:
    """Draft and target share some tokens: drafts consist of these, drawn with the noise of the target's ids.

    Fulfils DraftVocabulary. The draft model samples from its law over the common tokens; what it drafts, the target
    may spell with longer tokens of its own, so that drafts are respelled as they grow.

    coverage: share of common tokens in the target's spelling of a sample text. share: of them in its vocabulary.
    Raises DraftMismatchError for a draft model whose tokenizer changes the text, and for a coverage under a half unless
    it is forced.
    """

    def __init__(
        self,
        target: Tokenizer,
        own: Tokenizer,
        *,
        target_size: int,
        own_size: int,
        force: bool = False,
        sample_text: str = SAMPLE_TEXT,
    ) -> None:
        self.size = target_size
        token_map = map_tokens(target, own, target_size=target_size, own_size=own_size)
        common = np.flatnonzero(token_map.ids >= 0)
        self.token_map: TokenMap | None = token_map
        self.share = len(common) / target_size
        self.coverage = coverage(sample_text, target, token_map)
        self.note = f"draft model with {self.share:.1%} of the vocabulary, {self.coverage:.0%} of a sample text"
        self._own_ids = np.full(target_size, -1, dtype=np.int32)
        self._own_ids[token_map.ids[common]] = common
        self._specials = {target_id: own_id for own_id, target_id in special_pairs(target, own).items()}
        self._target = target
        self._own = own
        self._spellings = target.token_bytes()
        self._own_spellings = own.token_bytes()
        self._start = own.encode("")
        self._texts: dict[str, _Text] = {}
        self._check(sample_text, force=force)

    def read(self, view: RequestView) -> np.ndarray | None:
        """The known text in the draft model's tokens [K] int32; None in the middle of a character, and where the text
        has no token of it."""
        text = self._texts.get(view.request_id)
        if text is None:
            text = self._texts[view.request_id] = _Text(RetokenisedText(self._encode, self._own_spellings, self._start))
        for token_id in view.token_ids[text.num_read :].tolist():
            spelling = self._spelling(token_id)
            if spelling is None:
                text.own.append_special(self._specials.get(token_id))
                text.word.clear()
            else:
                text.own.append(spelling)
                if spelling.startswith(b" "):
                    text.word.clear()
                text.word.append(token_id)
        text.num_read = len(view.token_ids)
        tokens = text.own.tokens()
        return np.array(tokens, dtype=np.int32) if tokens else None

    def own_id(self, token_id: int) -> int:
        return int(self._own_ids[token_id])

    def respell(self, view: RequestView, drafted: list[int]) -> list[int]:
        """Drafted tokens as the target's tokenizer spells their text; as they are where it would spell the word that
        they go on with otherwise, too."""
        word = self._texts[view.request_id].word
        spellings = [self._spelling(token_id) for token_id in (*word, *drafted)]
        try:
            text = b"".join(spelling for spelling in spellings if spelling is not None).decode()
        except UnicodeDecodeError:  # in the middle of a character
            return drafted
        if None in spellings:
            return drafted
        respelled = self._target.encode(text, add_special_tokens=False)
        return respelled[len(word) :] if respelled[: len(word)] == word else drafted

    def release(self, request_id: str) -> None:
        self._texts.pop(request_id, None)

    def _encode(self, text: str) -> list[int]:
        return self._own.encode(text, add_special_tokens=False)

    def _spelling(self, token_id: int) -> bytes | None:
        return self._spellings[token_id] if token_id < len(self._spellings) else None

    def _check(self, sample_text: str, *, force: bool) -> None:
        spelled = b"".join(self._own_spellings[i] or b"" for i in self._encode(sample_text))
        if spelled != sample_text.encode():
            raise DraftMismatchError(
                "the draft model has another vocabulary than the target, and its tokenizer changes the text it reads: "
                "choose a model of the target's family, or one with a byte-level tokenizer."
            )
        if self.coverage < _LEAST_COVERAGE and not force:
            raise DraftMismatchError(
                f"the draft model has {self.coverage:.0%} of the target's tokens in a sample text; under "
                f'{_LEAST_COVERAGE:.0%} it can hardly pay: choose a model of its family, or set "force": true.'
            )
