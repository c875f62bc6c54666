"""Grammars compiled for a model's tokens. llguidance parses; this gives it the vocabulary, limits and a cache.

llguidance: https://github.com/guidance-ai/llguidance
"""

from __future__ import annotations

import json
from functools import lru_cache
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.errors import GrammarError, MissingDependencyError, PacelineError
from paceline.interfaces import Tokenizer
from paceline.params import Grammar
from paceline.sampling.marker import Marker
from paceline.sampling.processors import token_mask

if TYPE_CHECKING:
    from llguidance import LLMatcher

_MAX_CACHED = 64  # compiled grammars that are kept
# Between two lexemes of JSON: unbounded, a small model can go on with blank lines for ever.
_WHITESPACE = r"(?: |\n{1,2}[\t ]{0,20})"
_INITIAL_LEXER_FUEL = 100_000  # a tenth of llguidance's default, with which a regex of 20 characters keeps 160 MB
_MAX_LEXER_STATES = 50_000  # 1 to 2 kB each, of a sequence; of llguidance's default a hostile grammar takes 500 MB


class CompiledGrammar:
    """A grammar over the tokens of one model. Immutable."""

    def __init__(self, matcher: LLMatcher, *, marker: Marker | None) -> None:
        self._matcher = matcher
        self.marker = marker

    def matcher(self) -> LLMatcher:
        """A parser at the grammar's beginning, the caller's own."""
        return self._matcher.deep_copy()


class GrammarCompiler:
    """Compiles grammars for the tokens of one model, and keeps the latest. Safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer, *, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size  # of the model, which may have ids that the tokenizer lacks, and the reverse
        self._lock = Lock()
        self._vocabulary: _Vocabulary | None = None
        self._compiled = lru_cache(maxsize=_MAX_CACHED)(self._compile)

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """The grammar, compiled now or before. Takes milliseconds, for the first one about a second, and lets other
        threads run meanwhile.

        Raises GrammarError for a grammar that cannot be read, is too complex, has no text or none but the empty one,
        and MissingDependencyError without llguidance.
        """
        return self._compiled(grammar)

    def _compile(self, grammar: Grammar) -> CompiledGrammar:
        llguidance = _llguidance()
        vocabulary = self._tokens()
        limits = llguidance.LLParserLimits(
            initial_lexer_fuel=_INITIAL_LEXER_FUEL, max_lexer_states=_MAX_LEXER_STATES, verbose_errors=False
        )
        try:
            source = _source(grammar, llguidance.LLMatcher)
        except ValueError as error:
            raise _refused(grammar, str(error)) from error
        matcher = llguidance.LLMatcher(vocabulary.tokenizer, source, log_level=0, limits=limits)
        allowed = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)  # a grammar can fail here for the first time
        if matcher.is_error():
            raise _refused(grammar, matcher.get_error())
        if not (allowed & ~token_mask(vocabulary.ends, vocab_size=8 * len(allowed))).any():
            raise _refused(grammar, "no text follows it, or only the empty one")
        marker = (
            None
            if grammar.after is None
            else Marker(grammar.after, vocabulary.tokens, vocabulary.tokenizer.tokenize_bytes, matcher)
        )
        return CompiledGrammar(matcher, marker=marker)

    def _tokens(self) -> _Vocabulary:
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = _Vocabulary(self._tokenizer, vocab_size=self._vocab_size)
            return self._vocabulary


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise MissingDependencyError("grammars need llguidance: pip install 'paceline[serve]'.") from error
    return llguidance


class _Vocabulary:
    """What llguidance asks of a tokenizer: what the tokens add to a text, and how a text is spelled."""

    is_tokenizer_wrapper = True  # the mark by which llguidance knows such a class
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, *, vocab_size: int) -> None:
        self.ends = sorted(end for end in tokenizer.eos_ids if end < vocab_size)
        if not self.ends:
            raise GrammarError(
                "a grammar ends its text with the end-of-text token, and this model's tokenizer has none."
            )
        table = tokenizer.token_bytes()[:vocab_size]
        names = (tokenizer.token_text(i).encode() if spelling is None else spelling for i, spelling in enumerate(table))
        self.tokens = [*names, *[b""] * (vocab_size - len(table))]  # an id that nothing stands for is never allowed
        self.eos_token_id = self.ends[0]
        self.special_token_ids = sorted(i for i in tokenizer.special_ids | {*self.ends} if i < vocab_size)
        self._special = frozenset(self.special_token_ids)
        self._encode = tokenizer.encode
        self.tokenizer = _llguidance().LLTokenizer(self, eos_token=self.ends)

    def __call__(self, text: str) -> list[int]:
        """Token ids of this very text: where the tokenizer would change or not know it, greedily found ones."""
        try:
            ids = self._encode(text, add_special_tokens=False)
        except PacelineError:
            ids = []
        known = self._special.isdisjoint(ids) and max(ids, default=0) < len(self.tokens)
        if known and b"".join(self.tokens[i] for i in ids) == text.encode():
            return ids
        return self.tokenizer.greedy_tokenize(text)


def _source(grammar: Grammar, matcher: Any) -> str:
    """The grammar in the form that llguidance compiles. Raises ValueError for JSON that is none."""
    match grammar.kind:
        case "json_object":
            return matcher.grammar_from_json_schema('{"type": "object"}', defaults={"whitespace_pattern": _WHITESPACE})
        case "json_schema":
            return matcher.grammar_from_json_schema(grammar.text, defaults={"whitespace_pattern": _WHITESPACE})
        case "regex":
            return matcher.grammar_from_regex(grammar.text)
        case "lark":
            return matcher.grammar_from_lark(grammar.text)
        case "choice":
            return matcher.grammar_from_lark(_choice(grammar.text))


def _choice(text: str) -> str:
    try:
        choices = json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not (isinstance(choices, list) and choices and all(isinstance(c, str) and c for c in choices)):
        raise ValueError("choices are a list of texts, none of them empty")
    return "start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)


def _refused(grammar: Grammar, reason: str) -> GrammarError:
    if "NoExtensionBias" in reason:  # llguidance's word for it
        reason = "no text follows it; a rule may be nothing but itself"
    lines = [line.strip() for line in reason.splitlines() if line.strip()]
    return GrammarError(
        f"the grammar ({grammar.kind}) {grammar.text!r:.60} cannot be used: {' '.join(lines)[:200]}; change it."
    )
