"""Tokenizers built from GGUF files against transformers, against a plain SentencePiece and against themselves.

transformers' conversion takes 20 to 70 s a model, so its answers for SmolLM2 on 2,000 strings are committed as
digests (smollm2_token_digests.json); the slow test makes them again and does the same for the other models.
"""

from __future__ import annotations

import hashlib
import json
import random
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from gguf_writing import byte_vocabulary
from paceline.errors import ConfigError, CorruptFileError, PromptError, UnsupportedModelError
from paceline.models.gguf_tokenizer import PRE_TOKENIZERS
from paceline.models.loader import load
from paceline.models.tokenizer import Tokenizer

DIGESTS = Path(__file__).parent / "smollm2_token_digests.json"
PIECES = (
    "The quick brown fox", " jumps", " over", "the lazy dog", ". ", "? ", "! ", ", ", "; ", "It's", "we'll", "I'D",
    " THEY'VE", "\n", "\n\n", "\n\n\n\n", "\r\n", "\t", "\t\t", " ", "  ", "   ", "        ", "0", "7", "42", "1234567",
    "3.14159", "1e-9", " 2024-05-17", "²³", "١٢٣", "½", "def f(x):\n    return x ** 2\n",
    "for (int i = 0; i < n; ++i) {\n\t\ta[i] += 1;\n}", '<div class="a">', "</div>", "<table>", "SELECT * FROM t;",
    "camelCaseName", "snake_case_name", "#!/bin/sh", "//----", "====", "...", "…", "¿Qué?", "naïve café", "Ångström",
    "Straße", "Привет, мир", "Ελληνικά", "שלום", "مرحبا بالعالم", "नमस्ते", "สวัสดี", "你好，世界", "日本語テキスト",
    "カタカナ", "한국어 문장", "𝔘𝔫𝔦𝔠𝔬𝔡𝔢", "😀", "👩\u200d👩\u200d👧\u200d👦", "🇩🇪", "👍🏽", "❤️",
    "e\u0301", "a\u0308\u0323", "q\u0307", "\u200b",
    "\u00a0", "\u3000", "\ufeff", "\u2028", "→", "∑", "€", "“quoted”", "—", "<|im_start|>", "<|im_end|>",
    "<|endoftext|>", "<|im_start|>user\nhi<|im_end|>\n", "<bos>", "<end_of_turn>", "<0x0A>", "▁", "Ġ", "[PAD3]",
    "\x00", "\x7f", "ﬁ", "İ", "ß", "ſ",
)  # fmt: skip


# SmolLM2 has no token for some bytes, and its own tokenizer drops them: these controls, and what begins plane 4 and up.
TEXTS = st.text(
    st.characters(max_codepoint=0x3FFFF, exclude_categories=["Cs"], exclude_characters="\4\6\x13\x14\x16\x1d")
)


def varied_strings(count: int) -> list[str]:
    """Mixtures of prose, code, digits, spaces, scripts, emoji, combining marks and special tokens, and pure noise."""
    source = random.Random(0)
    ranges = ((32, 127), (0xA0, 0x800), (0x800, 0xD800), (0xE000, 0x20000))
    strings = []
    for _ in range(count):
        if source.random() < 0.15:
            strings.append(
                "".join(chr(source.randrange(*source.choice(ranges))) for _ in range(source.randrange(1, 40)))
            )
        else:
            strings.append("".join(source.choice(PIECES) for _ in range(source.randrange(1, 16))))
    return strings


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:8]


def _transformers(model: str):
    from transformers import AutoTokenizer

    loaded = load(model, progress=False)
    return loaded.tokenizer, AutoTokenizer.from_pretrained(str(loaded.path.parent), gguf_file=loaded.path.name)


@pytest.fixture(scope="module")
def smollm2_tokenizer(smollm2) -> Tokenizer:
    return smollm2.tokenizer


def test_smollm2_as_transformers_tokenizes(smollm2_tokenizer):
    recorded = json.loads(DIGESTS.read_text("utf-8"))
    strings = varied_strings(2000)
    assert _digest(strings) == recorded["strings"], "the generator gives other strings here: run the slow test"
    ours = [smollm2_tokenizer.encode(text) for text in strings]
    wrong = [text for text, ids, digest in zip(strings, ours, recorded["ids"], strict=True) if _digest(ids) != digest]
    assert wrong == []
    for text, ids in zip(strings, ours, strict=True):
        assert smollm2_tokenizer.decode(ids, skip_special_tokens=False) == text


@pytest.mark.slow
def test_smollm2_against_transformers():
    """transformers knows no "smollm" pre-tokenizer and takes GPT-2's: it does not split off the single digits that the
    model was trained on (its own tokenizer.json: Digits(individual_digits=True), then ByteLevel). So the comparison
    is made twice: on the strings without any numeric character, and on all with that splitter put in."""
    ours, theirs = _transformers("smollm2-135m")
    strings = varied_strings(2000)
    plain = [text for text in strings if not any(char.isnumeric() for char in text)]
    assert len(plain) > 500
    assert [text for text in plain if ours.encode(text) != theirs.encode(text)] == []
    theirs.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    expected = [theirs.encode(text) for text in strings]
    assert [text for text, ids in zip(strings, expected, strict=True) if ours.encode(text) != ids] == []
    for text, ids in zip(strings, expected, strict=True):
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True), text
    recorded = {"strings": _digest(strings), "ids": [_digest(ids) for ids in expected]}
    assert json.loads(DIGESTS.read_text("utf-8")) == recorded


@pytest.mark.slow
def test_qwen_against_transformers():
    """transformers' conversion drops the NFC normalisation that Qwen's own tokenizer.json begins with; it is put in."""
    import unicodedata

    ours, theirs = _transformers("qwen2.5-coder-1.5b")
    for text in varied_strings(2000):
        expected = theirs.encode(unicodedata.normalize("NFC", text))
        assert ours.encode(text) == expected, text
        assert ours.decode(expected) == theirs.decode(expected, skip_special_tokens=True)
    assert ours.vocab_size == 151665  # without the rows that pad the embeddings


@pytest.mark.slow
def test_gemma_against_transformers():
    ours, theirs = _transformers("gemma3-270m")
    for text in varied_strings(2000):
        ids = ours.encode(text)
        assert ids == theirs.encode(text), text
        # a written ▁ is this vocabulary's space
        assert ours.decode(ids, skip_special_tokens=False) == "<bos>" + text.replace("▁", " ")
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


@given(TEXTS)
def test_round_trip(smollm2_tokenizer, text):
    ids = smollm2_tokenizer.encode(text)
    assert smollm2_tokenizer.decode(ids, skip_special_tokens=False) == text
    assert all(0 <= i < smollm2_tokenizer.vocab_size for i in ids)


def test_smollm2_ends_and_specials(smollm2_tokenizer):
    assert smollm2_tokenizer.eos_ids == {0, 2}  # <|endoftext|>, <|im_end|>
    assert smollm2_tokenizer.special_ids == set(range(17))
    assert smollm2_tokenizer.decode([1, 19556, 2]) == "Hello"
    assert smollm2_tokenizer.decode([1, 19556, 2], skip_special_tokens=False) == "<|im_start|>Hello<|im_end|>"
    assert smollm2_tokenizer.decode([10**6]) == ""
    assert smollm2_tokenizer.token_text(905) == " world"
    chat = [{"role": "user", "content": "Hi"}]
    assert smollm2_tokenizer.decode(smollm2_tokenizer.encode_chat(chat), skip_special_tokens=False) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


# --- byte-level vocabularies written here


def _byte_level(**changes) -> dict:
    tokens, types, merges = byte_vocabulary()
    return {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types, "tokenizer.ggml.merges": merges, "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.bos_token_id": 0, **{f"tokenizer.ggml.{key}": value for key, value in changes.items()},
    }  # fmt: skip


def _pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.token_text(i) for i in tokenizer.encode(text)]


def test_merges_in_order():
    tokenizer = Tokenizer.from_gguf(_byte_level())
    assert _pieces(tokenizer, "hell the then") == ["he", "ll", " the", " the", "n"]


def test_padding_rows_are_no_tokens():
    tokens, types, _ = byte_vocabulary()
    padded = Tokenizer.from_gguf(_byte_level(tokens=[*tokens, f"[PAD{len(tokens)}]"], token_type=[*types, 5]))
    plain = Tokenizer.from_gguf(_byte_level())
    assert padded.vocab_size == plain.vocab_size
    assert padded.fingerprint == plain.fingerprint
    other = Tokenizer.from_gguf(_byte_level(tokens=[tokens[1], tokens[0], *tokens[2:]]))
    assert other.fingerprint != plain.fingerprint


def test_start_token_where_the_file_or_the_rule_asks_for_it():
    assert Tokenizer.from_gguf(_byte_level()).encode("n")[0] != 0
    with_start = Tokenizer.from_gguf(_byte_level(add_bos_token=True, add_eos_token=True))
    assert with_start.encode("n") == [0, *with_start.encode("n", add_special_tokens=False), 2]
    assert Tokenizer.from_gguf(_byte_level(pre="llama-bpe")).encode("n")[0] == 0
    assert Tokenizer.from_gguf(_byte_level(pre="llama-bpe", add_bos_token=False)).encode("n")[0] != 0


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("gpt-2", "a1234 b  c", ["a", "1234", " b", " ", " c"]),
        ("smollm", "a1234 b  c", ["a", "1", "2", "3", "4", " b", " ", " c"]),
        ("qwen2", "a1234 b  c\n\nd.\n", ["a", "1", "2", "3", "4", " b", " ", " c", "\n\n", "d", ".\n"]),
        ("llama-bpe", "a1234 b  c\n\nDON'T.x", ["a", "123", "4", " b", " ", " c", "\n\n", "DON", "'T", ".x"]),
        ("tekken", "aB1234 Cd/\n", ["a", "B", "1", "2", "3", "4", " Cd", "/\n"]),
    ],
)
def test_splitting_rules(pre, text, expected):
    backend = Tokenizer.from_gguf(_byte_level(pre=pre))._backend
    assert backend.pre_tokenizer is not None
    spans = [text[start:end] for _, (start, end) in backend.pre_tokenizer.pre_tokenize_str(text)]
    assert spans == expected


def test_whole_words_ignore_merges():
    tokens, types, merges = byte_vocabulary()
    changes = {"tokens": [*tokens, "xyz"], "token_type": [*types, 1], "merges": merges, "add_bos_token": False}
    assert _pieces(Tokenizer.from_gguf(_byte_level(pre="llama-bpe", **changes)), "xyz") == ["xyz"]
    assert _pieces(Tokenizer.from_gguf(_byte_level(pre="smaug-bpe", **changes)), "xyz") == ["x", "y", "z"]


def test_qwen_composes_characters():
    tokenizer = Tokenizer.from_gguf(_byte_level(pre="qwen2"))
    assert tokenizer.encode("e\u0301") == tokenizer.encode("\u00e9")


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"pre": "chameleon"}, UnsupportedModelError, "pre-tokenizer 'chameleon' is not supported; supported are"),
        ({"model": "rwkv"}, UnsupportedModelError, "tokenizer model 'rwkv' is not supported"),
        ({"tokens": []}, CorruptFileError, "no tokenizer vocabulary"),
        ({"tokens": [1, 2]}, CorruptFileError, "no tokenizer vocabulary"),
        ({"token_type": [1]}, CorruptFileError, "but 1 token types"),
        ({"merges": None}, CorruptFileError, "no tokenizer merges"),
        ({"merges": ["a b c"]}, CorruptFileError, "a merge is not a pair"),
        ({"merges": ["no such"]}, CorruptFileError, "malformed"),
        ({"eos_token_id": 10**6}, CorruptFileError, "eos_token_id 1000000 is not a token"),
        ({"bos_token_id": 0.5, "add_bos_token": True}, CorruptFileError, "malformed"),
    ],
)
def test_refusals(changes, error, message):
    with pytest.raises(error, match=message) as caught:
        Tokenizer.from_gguf(_byte_level(**changes))
    assert "\n" not in str(caught.value)


def test_every_rule_round_trips():
    text = "It's 1234 x\n\n  DON'T café 你好"
    for pre in PRE_TOKENIZERS:
        tokenizer = Tokenizer.from_gguf(_byte_level(pre=pre))
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == text, pre


# --- SentencePiece-style vocabularies


def _sentencepiece(**changes) -> tuple[dict, dict[str, float]]:
    pieces = ["▁", "a", "b", "c", "ab", "bc", "abc", "▁a", "▁ab", "ca", "cab", "▁▁", "aa", "aaa", "▁abc"]
    ranked = ["▁a", "bc", "ab", "aa", "▁▁", "ca", "abc", "▁ab", "cab", "aaa", "▁abc"]
    scores = {piece: -float(ranked.index(piece)) if piece in ranked else -100.0 for piece in pieces}
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    metadata = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + [scores[piece] for piece in pieces],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(pieces),
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    return metadata | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}, scores


def _join_best_pair(text: str, scores: dict[str, float]) -> list[str]:
    """SentencePiece BPE, literally: while any neighbours make a token, join the best-scored, leftmost pair."""
    parts = list(text)
    while True:
        pairs = [(scores[a + b], -i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in scores]
        if not pairs:
            return parts
        i = -max(pairs)[1]
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


@given(st.text(alphabet="abc ", max_size=20))
def test_sentencepiece_joins_the_best_pair(text):
    metadata, scores = _sentencepiece(add_space_prefix=False, add_bos_token=False)
    tokenizer = Tokenizer.from_gguf(metadata)
    ids = tokenizer.encode(text)
    tokens = metadata["tokenizer.ggml.tokens"]
    assert [tokens[i] for i in ids] == _join_best_pair(text.replace(" ", "▁"), scores)
    assert tokenizer.decode(ids) == text


def test_space_prefix_start_token_and_bytes():
    tokenizer = Tokenizer.from_gguf(_sentencepiece()[0])
    tokens = _sentencepiece()[0]["tokenizer.ggml.tokens"]
    ids = tokenizer.encode("ab é")
    assert [tokens[i] for i in ids] == ["<s>", "▁ab", "▁", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(ids) == "ab é"
    assert tokenizer.token_text(ids[1]) == " ab"
    assert [tokens[i] for i in tokenizer.encode("</s>")] == ["<s>", "</s>"]


def test_bytes_of_tokens(smollm2_tokenizer):
    table = smollm2_tokenizer.token_bytes()
    assert len(table) == smollm2_tokenizer.vocab_size
    for text in varied_strings(20):
        ids = smollm2_tokenizer.encode(text)
        if not smollm2_tokenizer.special_ids.intersection(ids):
            assert b"".join(table[i] for i in ids).decode() == text
    assert {i for i, spelling in enumerate(table) if spelling is None} == smollm2_tokenizer.special_ids
    metadata, _ = _sentencepiece()
    table = Tokenizer.from_gguf(metadata).token_bytes()
    spelled = dict(zip(metadata["tokenizer.ggml.tokens"], table, strict=True))
    assert (spelled["▁ab"], spelled["<0xC3>"], spelled["<s>"]) == (b" ab", b"\xc3", None)


def test_sentencepiece_needs_scores_or_merges():
    metadata, _ = _sentencepiece(scores=None)
    with pytest.raises(CorruptFileError, match="neither merges nor a score"):
        Tokenizer.from_gguf(metadata)


# --- Hugging Face folders


def test_folder_settings(tiny_llama, tmp_path):
    tokenizer = Tokenizer.from_folder(tiny_llama)
    config = json.loads((tiny_llama / "config.json").read_text())
    assert config["eos_token_id"] in tokenizer.eos_ids
    for name in ("tokenizer.json", "config.json"):
        (tmp_path / name).write_bytes((tiny_llama / name).read_bytes())
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [0, 2]}')
    settings = {"bos_token": {"content": "<|im_start|>"}, "eos_token": "<|im_end|>", "add_bos_token": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0].content }}")
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.eos_ids == {0, 2}
    assert tokenizer.encode("x")[0] == 1
    assert tokenizer.render_chat([{"role": "user", "content": "x"}]) == "<|im_start|>x"
    assert tokenizer.fingerprint == Tokenizer.from_folder(tiny_llama).fingerprint


def test_named_templates_and_none(tiny_base, tmp_path):
    with pytest.raises(ConfigError, match="no chat template"):
        Tokenizer.from_folder(tiny_base).render_chat([{"role": "user", "content": "x"}])
    (tmp_path / "tokenizer.json").write_bytes((tiny_base / "tokenizer.json").read_bytes())
    named = [{"name": "rag", "template": "R"}, {"name": "default", "template": "D"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert Tokenizer.from_folder(tmp_path).render_chat([{"role": "user", "content": "x"}]) == "D"


def test_lone_surrogates(tiny_llama, tmp_path):
    with pytest.raises(PromptError, match=r"not valid Unicode: character 1 is the lone surrogate '\\ud800'"):
        Tokenizer.from_folder(tiny_llama).encode("a\ud800")
    (tmp_path / "tokenizer.json").write_bytes((tiny_llama / "tokenizer.json").read_bytes())
    for template in ("\ud800", "{{ '\\ud800' }}"):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
        with pytest.raises(PromptError, match="not valid Unicode"):
            Tokenizer.from_folder(tmp_path).encode_chat([{"role": "user", "content": "x"}])


def test_folder_without_a_tokenizer(tmp_path):
    with pytest.raises(CorruptFileError, match=r"has no tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", b'{"a": ', r"tokenizer\.json is malformed"),
        ("tokenizer_config.json", b'{"a": ', r"tokenizer_config\.json is not valid JSON"),
        ("tokenizer_config.json", b"[" * 100_000, r"tokenizer_config\.json is not valid JSON"),
        ("tokenizer_config.json", b'{"eos_token": "nope", "add_eos_token": true}', "'nope' is not in the tokenizer's"),
        ("tokenizer_config.json", b'{"eos_token": {"content": "\\ud800"}}', "not valid Unicode"),
        ("tokenizer_config.json", b'{"chat_template": [{"name": [], "template": "x"}]}', "without a name"),
        ("generation_config.json", b'{"a": ', r"generation_config\.json is not valid JSON"),
        ("chat_template.jinja", b"\xff\xfe\0", r"chat_template\.jinja is not UTF-8 text"),
    ],
)
def test_malformed_files(name, content, message, tiny_llama, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes((tiny_llama / "tokenizer.json").read_bytes())
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CorruptFileError, match=message) as caught:
        Tokenizer.from_folder(tmp_path)
    assert "\n" not in str(caught.value)
