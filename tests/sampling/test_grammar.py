"""Masks of compiled grammars against the language written out; grammars that cannot be used."""

from __future__ import annotations

import json
import random
import re
import sys
from itertools import product

import numpy as np
import pytest

from paceline.errors import ConfigError, MissingDependencyError
from paceline.params import Grammar, SamplingParams
from paceline.sampling.grammar import GrammarCompiler
from paceline.sampling.grammar_state import GrammarState
from paceline.testing import CharTokenizer
from piece_tokenizer import PieceTokenizer

CHARS = CharTokenizer("abc.")
PIECES = PieceTokenizer([b"a", b"b", b"c", b".", b"ab", b"abc", b"bc", b"c.", b"\xc3", b"\xa9", b"\xc3\xa9a"])
PATTERNS = ["(ab|ba){1,3}", "a*b", "abc[.]", "a?b?c?", "(a|ab)(c|bc)[.]", "[abc]{2}"]


def state_of(grammar: Grammar, tokenizer=CHARS, *, vocab_size: int | None = None, **params) -> GrammarState:
    size = vocab_size or tokenizer.vocab_size
    compiled = GrammarCompiler(tokenizer, vocab_size=size).compile(grammar)
    return GrammarState(compiled, SamplingParams(**params), eos_ids=tokenizer.eos_ids, vocab_size=size)


def allowed(state: GrammarState, size: int) -> set[int]:
    _, masks = state.constrain(None, limit=0)
    return set(np.flatnonzero(np.unpackbits(masks[0], bitorder="little", count=size)).tolist())


def language(pattern: str, *, up_to: int = 7) -> set[str]:
    texts = ("".join(letters) for length in range(up_to + 1) for letters in product("abc.", repeat=length))
    return {text for text in texts if re.fullmatch(pattern, text)}


@pytest.mark.parametrize("pattern", PATTERNS)
def test_exactly_the_tokens_that_lead_to_a_text_of_the_language_are_allowed(pattern):
    texts = language(pattern)
    (eos,) = CHARS.eos_ids
    begun = {text[:length] for text in texts for length in range(len(text) + 1)}
    for known in sorted(begun):
        if len(known) > 5:  # what follows may be longer than what was enumerated
            continue
        state = state_of(Grammar.regex(pattern))
        state.append(CHARS.encode(known, add_special_tokens=False))
        following = {CHARS.encode(c, add_special_tokens=False)[0] for c in "abc." if known + c in begun}
        if following:
            assert state.status == "open"
            assert allowed(state, CHARS.vocab_size) == following | ({eos} if known in texts else set()), known
        else:
            assert state.status == "complete", known


def test_bytes_of_a_character_may_be_spread_over_tokens():
    state = state_of(Grammar.choice(["éa", "éb"]), PIECES)
    a, b, first, second, rest = (PIECES.id_of(p) for p in (b"a", b"b", b"\xc3", b"\xa9", b"\xc3\xa9a"))
    assert allowed(state, PIECES.vocab_size) <= {first, rest}
    state.append([first])
    assert allowed(state, PIECES.vocab_size) == {second}
    state.append([second])
    assert allowed(state, PIECES.vocab_size) == {a, b}
    state.append([b])
    assert state.status == "complete"


def test_a_text_without_choice_is_spelled_as_the_tokenizer_spells_it():
    state = state_of(Grammar.choice(["abc.a", "abc.b"]), PIECES)
    assert allowed(state, PIECES.vocab_size) == {PIECES.id_of(b"abc")}
    draft, masks = state.constrain(None, limit=5)
    assert draft is not None
    assert (draft.token_ids.tolist(), draft.source) == ([PIECES.id_of(b"abc"), PIECES.id_of(b".")], "grammar")
    assert len(masks) == 3


@pytest.mark.parametrize("extra", [-2, 1, 7, 100])
def test_model_and_tokenizer_may_differ_in_size(extra):
    size = CHARS.vocab_size + extra
    state = state_of(Grammar.regex("[abc.]+"), vocab_size=size)
    assert allowed(state, size) == set(range(2, min(size, CHARS.vocab_size)))


def test_special_tokens_are_no_text():
    state = state_of(Grammar.regex("<bos>a|<eos>b|[^x]{3}"), CharTokenizer("<bose>axb"))
    assert allowed(state, CharTokenizer("<bose>axb").vocab_size).isdisjoint({0, 1})


def test_compiled_once():
    compiler = GrammarCompiler(CHARS, vocab_size=CHARS.vocab_size)
    assert compiler.compile(Grammar.regex("a+")) is compiler.compile(Grammar.regex("a+"))
    assert compiler.compile(Grammar.regex("a+")) is not compiler.compile(Grammar.regex("a+", after="b"))


DEEP = '{"items":' * 5000 + "{}" + "}" * 5000
UNUSABLE = {
    "regex": ["(a", "", "[a&&b]", "(" * 2000 + "a" + ")" * 2000, "(?=a)b"],
    "json_schema": [
        "{", "[]", "3", "", "false", DEEP, '{"type": "foo"}', '{"uniqueItems": true}', '{"$ref": "#"}', '{"not": {}}',
        '{"type": "integer", "minimum": 5, "maximum": 3}', '{"$ref": "https://example.com/schema"}',
        json.dumps({"allOf": [{"anyOf": [{"properties": {f"p{i}_{j}": {}}} for j in range(9)]} for i in range(9)]}),
    ],
    "lark": ["", "start:", 'x: "a"', "start: undefined", "start: start", "start: " + "(" * 5000 + '"a"' + ")" * 5000],
    "choice": ["", "{}", "[]", '[""]', "[1]", "[" * 100_000],
}  # fmt: skip


@pytest.mark.parametrize(("kind", "text"), [(kind, text) for kind, texts in UNUSABLE.items() for text in texts])
def test_unusable_grammars_are_refused_in_one_line(kind, text):
    tokenizer = CharTokenizer()
    with pytest.raises(ConfigError, match=rf"^the grammar \({kind}\) .* cannot be used: .*; change it\.$") as caught:
        GrammarCompiler(tokenizer, vocab_size=tokenizer.vocab_size).compile(Grammar(kind, text))
    assert len(str(caught.value)) < 350


def test_a_grammar_without_texts_is_called_so():
    compiler = GrammarCompiler(CHARS, vocab_size=CHARS.vocab_size)
    for grammar in (Grammar.lark("start: start"), Grammar.json_schema({"$ref": "#"})):
        with pytest.raises(ConfigError, match="no text follows it; a rule may be nothing but itself"):
            compiler.compile(grammar)


def test_whitespace_of_json_ends():
    tokenizer = CharTokenizer()
    state = state_of(Grammar.json_object(), tokenizer)
    state.append(tokenizer.encode("{\n\n" + " " * 20, add_special_tokens=False))
    texts = {tokenizer.token_text(token) for token in allowed(state, tokenizer.vocab_size)}
    assert texts == {'"', "}"}


def test_choices_may_hold_anything():
    choices = ['say "so"\n', "a\\b", "tab\t", "a", "ab"]
    tokenizer = CharTokenizer()
    for choice in choices:
        state = state_of(Grammar.choice(choices), tokenizer)
        state.append(tokenizer.encode(choice, add_special_tokens=False))
        assert state.status == "complete" or tokenizer.eos_ids <= allowed(state, tokenizer.vocab_size)


def test_without_llguidance(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'paceline\[serve\]'"):
        GrammarCompiler(CHARS, vocab_size=CHARS.vocab_size).compile(Grammar.json_object())


def test_tokens_of_a_real_vocabulary_spell_what_they_are_allowed_to(smollm2):
    """JSON as the tokenizer spells it is accepted token by token, and what is masked would break it."""
    tokenizer = smollm2.tokenizer
    size = tokenizer.vocab_size + 40
    compiled = GrammarCompiler(tokenizer, vocab_size=size).compile(Grammar.json_object())
    rng = random.Random(1)
    for _ in range(20):
        value = {"key é": rng.choice([1.5, True, None, ["x\n", "日本"], {"a b": -3}]), "n": rng.randrange(10**6)}
        text = json.dumps(value, ensure_ascii=False, indent=rng.choice([None, 2]))
        state = GrammarState(compiled, SamplingParams(), eos_ids=tokenizer.eos_ids, vocab_size=size)
        for token_id in tokenizer.encode(text, add_special_tokens=False):
            assert state.status == "open"
            assert token_id in allowed(state, size)
            state.append([token_id])
        assert state.status == "complete"


def test_a_short_text_may_not_stand_for_a_large_automaton(smollm2):
    tokenizer = smollm2.tokenizer
    compiler = GrammarCompiler(tokenizer, vocab_size=49152)
    compiler.compile(Grammar.regex("a?" * 200))
    with pytest.raises(ConfigError, match="lexer precomputation failed"):
        compiler.compile(Grammar.regex("a?" * 500 + "a{50000}"))
