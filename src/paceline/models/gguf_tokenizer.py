"""Builds a tokenizer from a GGUF file's vocabulary.

The splitting rules are those of the models' own tokenizer.json files and of llama.cpp's llama-vocab.cpp, which gives
them the names that GGUF files carry in `tokenizer.ggml.pre`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline.errors import CorruptFileError, UnsupportedModelError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 2, 3, 4, 5, 6  # tokenizer.ggml.token_type
_SPACE = "▁"  # SentencePiece's visible space

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class _Rule:
    """How a byte-level vocabulary splits text before merging."""

    pattern: str | None = None  # None = GPT-2's, built into the byte-level splitter
    single_digits: bool = False  # each digit alone, before the pattern
    nfc: bool = False  # text is brought to Unicode's composed form first
    whole_words: bool = False  # a word that is in the vocabulary is taken whole, whatever the merges say
    add_bos: bool = False  # where the file does not say


_LLAMA3_RULE = _Rule(pattern=_LLAMA3, whole_words=True, add_bos=True)
PRE_TOKENIZERS: Mapping[str, _Rule] = {
    "default": _Rule(),
    "gpt-2": _Rule(),
    "smollm": _Rule(single_digits=True),
    "starcoder": _Rule(single_digits=True),
    "llama3": _LLAMA3_RULE,
    "llama-v3": _LLAMA3_RULE,
    "llama-bpe": _LLAMA3_RULE,
    "smaug-bpe": _Rule(pattern=_LLAMA3),
    "dbrx": _Rule(pattern=_LLAMA3),
    "qwen2": _Rule(pattern=_QWEN2, nfc=True),
    "deepseek-r1-qwen": _Rule(pattern=_QWEN2),
    "tekken": _Rule(pattern=_TEKKEN, whole_words=True, add_bos=True),
}


def build_backend(metadata: Mapping[str, Any]) -> Backend:
    """A tokenizers.Tokenizer from GGUF metadata (raw keys).

    Raises UnsupportedModelError for a tokenizer model or pre-tokenizer that is not implemented, CorruptFileError for a
    vocabulary that is missing or inconsistent.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise UnsupportedModelError(f"the GGUF's tokenizer model {kind!r} is not supported; supported are gpt2, llama.")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens or not all(isinstance(token, str) for token in tokens):
        raise CorruptFileError("the GGUF has no tokenizer vocabulary: use a complete file.")
    types = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    if len(types) != len(tokens):
        raise CorruptFileError(f"the GGUF has {len(tokens)} tokens but {len(types)} token types: download it again.")
    try:
        if kind == "gpt2":
            backend, add_bos = _byte_level(metadata, tokens, types)
        else:
            tokens = _visible_spaces(tokens)
            backend, add_bos = _sentencepiece(metadata, tokens, types), True
        _add_special_tokens(backend, tokens, types)
        bos = _end(metadata, tokens, "bos", default=add_bos)
        add_ends(backend, bos=bos, eos=_end(metadata, tokens, "eos", default=False))
    except (TypeError, ValueError, IndexError, KeyError, OverflowError) as error:
        raise CorruptFileError(f"the GGUF's tokenizer is malformed ({error}): download it again.") from error
    return backend


def add_ends(backend: Backend, *, bos: str | None, eos: str | None) -> None:
    """Makes encoding with special tokens put `bos` before and `eos` after the text.

    Raises CorruptFileError for one that is not in the vocabulary.
    """
    from tokenizers.processors import TemplateProcessing

    ends = {token: backend.token_to_id(token) for token in (bos, eos) if token is not None}
    for token, token_id in ends.items():
        if token_id is None:
            raise CorruptFileError(
                f"the start or end token {token!r:.80} is not in the tokenizer's vocabulary: download the model again."
            )
    template = [*([bos] if bos else []), "$A", *([eos] if eos else [])]
    backend.post_processor = TemplateProcessing(single=template, special_tokens=list(ends.items()))


def _byte_level(metadata: Mapping[str, Any], tokens: list[str], types: list[int]) -> tuple[Backend, bool]:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    name = metadata.get("tokenizer.ggml.pre", "default")
    if name not in PRE_TOKENIZERS:
        raise UnsupportedModelError(
            f"the GGUF's pre-tokenizer {name!r} is not supported; supported are {', '.join(PRE_TOKENIZERS)}."
        )
    rule = PRE_TOKENIZERS[name]
    merges = _file_merges(metadata)
    if merges is None:
        raise CorruptFileError("the GGUF has no tokenizer merges: use a complete file.")
    vocab = _vocabulary(tokens, types)
    backend = Tokenizer(_bpe(models.BPE, vocab=vocab, merges=merges, ignore_merges=rule.whole_words))
    if rule.nfc:
        backend.normalizer = normalizers.NFC()
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if rule.single_digits else []
    if rule.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(rule.pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=rule.pattern is None))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    return backend, rule.add_bos


def _sentencepiece(metadata: Mapping[str, Any], tokens: list[str], types: list[int]) -> Backend:
    from tokenizers import Tokenizer, decoders, models, normalizers

    merges = _file_merges(metadata)
    if merges is None:
        scores = metadata.get("tokenizer.ggml.scores")
        if str(metadata.get("general.architecture")).startswith("gemma"):
            scores = range(0, -len(tokens), -1)  # Gemma's merges follow the order of its ids, not its scores
        if scores is None or len(scores) != len(tokens):
            raise CorruptFileError(
                "the GGUF's tokenizer has neither merges nor a score for each token: use another file."
            )
        merges = _merges_by_score(tokens, types, scores)
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    backend = Tokenizer(
        _bpe(
            models.BPE,
            vocab=_vocabulary(tokens, types),
            merges=merges,
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=_BYTE in types,
        )
    )
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    visible = normalizers.Replace(" ", _SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), visible]) if prefix else visible
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(steps)
    return backend


def _bpe(model: Any, **options: Any) -> Any:
    try:
        return model(**options)
    except Exception as error:  # the library raises bare Exception for a merge outside the vocabulary
        raise ValueError(str(error)) from error


def _vocabulary(tokens: list[str], types: list[int]) -> dict[str, int]:
    """Token -> id, without the rows that only pad the embedding matrix to a round size."""
    return {
        token: i
        for i, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind != _UNUSED or token != f"[PAD{i}]"
    }


def _file_merges(metadata: Mapping[str, Any]) -> list[tuple[str, str]] | None:
    lines = metadata.get("tokenizer.ggml.merges")
    if lines is None:
        return None
    merges = [tuple(line.split(" ")) for line in lines]
    if any(len(pair) != 2 for pair in merges):
        raise ValueError("a merge is not a pair")
    return merges  # type: ignore[return-value]


def _merges_by_score(tokens: list[str], types: list[int], scores: Any) -> list[tuple[str, str]]:
    """SentencePiece joins the neighbours that make the best-scored token: as merges, best token first, all splits."""
    mergeable = {
        token for token, kind in zip(tokens, types, strict=True) if kind not in (_CONTROL, _UNKNOWN, _UNUSED, _BYTE)
    }
    merges = []
    for i in sorted(range(len(tokens)), key=lambda i: -scores[i]):
        token = tokens[i]
        if token in mergeable:
            for cut in range(len(token) - 1, 0, -1):
                if (left := token[:cut]) in mergeable and (right := token[cut:]) in mergeable:
                    merges.append((left, right))
    return merges


def _visible_spaces(tokens: list[str]) -> list[str]:
    # llama.cpp's converter writes tokens of several spaces with real ones; the vocabulary proper has visible ones
    return [_SPACE * len(token) if token and not token.strip(" ") else token for token in tokens]


def _add_special_tokens(backend: Backend, tokens: list[str], types: list[int]) -> None:
    """Control tokens are found whole in the text and hidden by decoding; user-defined ones only the former."""
    from tokenizers import AddedToken

    added = [
        AddedToken(token, normalized=False, special=kind == _CONTROL)
        for token, kind in zip(tokens, types, strict=True)
        if kind in (_CONTROL, _USER_DEFINED) and token
    ]
    backend.add_tokens(added)


def _end(metadata: Mapping[str, Any], tokens: list[str], name: str, *, default: bool) -> str | None:
    """The bos or eos token, if encoding adds it."""
    token_id = metadata.get(f"tokenizer.ggml.{name}_token_id")
    if token_id is None or not metadata.get(f"tokenizer.ggml.add_{name}_token", default):
        return None
    return tokens[token_id]
