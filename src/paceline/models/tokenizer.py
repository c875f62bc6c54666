"""Text to token ids and back, and chat messages to text, for any supported model."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import ConfigError, CorruptFileError, MissingDependencyError, PromptError
from paceline.models.chat_template import ChatTemplate
from paceline.models.gguf_tokenizer import add_ends, build_backend

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_GGUF_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_GGUF_END_KEYS = ("eos", "eot", "eom")
# Control tokens that end a turn or a text, also where a GGUF's keys name only one of them (as llama.cpp does).
_END_TEXTS = frozenset(
    ("<|endoftext|>", "<|im_end|>", "<|end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<end_of_turn>")
)
_SLOW_FILES = ("tokenizer.model", "vocab.json", "spiece.model", "tekken.json")


def _byte_spelling() -> Mapping[int, int]:
    """The byte that each character stands for in byte-level vocabularies (GPT-2's bytes_to_unicode), by its ordinal."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {byte: byte for byte in shown} | {256 + i: byte for i, byte in enumerate(hidden)}


_BYTE_OF = _byte_spelling()


class Tokenizer:
    """A model's tokenizer. Immutable and thread-safe."""

    def __init__(
        self,
        backend: Backend,
        *,
        eos_ids: Iterable[int] = (),
        chat_template: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
    ) -> None:
        """`special_tokens` are what a chat template may name: bos_token, eos_token, ..."""
        self._backend = backend
        self._chat_template = (
            None if chat_template is None else ChatTemplate(chat_template, special_tokens=special_tokens or {})
        )
        self._byte_level = type(backend.decoder).__name__ == "ByteLevel"
        self.eos_ids = frozenset(eos_ids)
        self.special_ids = frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """From the metadata of a GGUF file (raw keys).

        Raises UnsupportedModelError or CorruptFileError as gguf_tokenizer.build_backend does.
        """
        backend = build_backend(metadata)
        ids = {name: _gguf_id(metadata, name) for name in (*_GGUF_SPECIAL.values(), *_GGUF_END_KEYS)}
        special = {
            name: token
            for name, key in _GGUF_SPECIAL.items()
            if (token_id := ids[key]) is not None and (token := backend.id_to_token(token_id)) is not None
        }
        eos_ids = {token_id for name in _GGUF_END_KEYS if (token_id := ids[name]) is not None}
        eos_ids |= {i for i, t in backend.get_added_tokens_decoder().items() if t.special and t.content in _END_TEXTS}
        template = metadata.get("tokenizer.chat_template")
        return cls(
            backend,
            eos_ids=eos_ids,
            chat_template=template if isinstance(template, str) else None,
            special_tokens=special,
        )

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        """From the tokenizer files of a Hugging Face model folder.

        Raises CorruptFileError for a missing or malformed file, MissingDependencyError where only transformers could
        convert the files and it is not installed.
        """
        backend = _backend_from_folder(folder)
        backend.no_truncation()
        backend.no_padding()
        settings = _read_json(folder / "tokenizer_config.json")
        special = {name: text for name in _SPECIAL_NAMES if (text := _token_text(settings.get(name))) is not None}
        if isinstance(settings.get("add_bos_token"), bool) or isinstance(settings.get("add_eos_token"), bool):
            add_ends(
                backend,
                bos=special.get("bos_token") if settings.get("add_bos_token") else None,
                eos=special.get("eos_token") if settings.get("add_eos_token") else None,
            )
        configs = (_read_json(folder / "generation_config.json"), _read_json(folder / "config.json"))
        eos_ids = {i for config in configs for i in _as_ids(config.get("eos_token_id"))}
        if "eos_token" in special and (eos_id := backend.token_to_id(special["eos_token"])) is not None:
            eos_ids.add(eos_id)
        return cls(
            backend,
            eos_ids=eos_ids,
            chat_template=_folder_template(folder, settings),
            special_tokens=special,
        )

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, with the model's own start token unless add_special_tokens is False.

        Special tokens written out in the text become their ids. Raises PromptError for a lone surrogate.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise PromptError(
                f"the text is not valid Unicode: character {error.start} is the lone surrogate "
                f"{text[error.start]!r}; replace it."
            ) from error
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids; bytes that make no character become U+FFFD, ids beyond the vocabulary nothing."""
        return self._backend.decode([int(i) for i in ids], skip_special_tokens=skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """The text that one token adds, its leading space included; "" beyond the vocabulary."""
        if self._byte_level:
            return self.decode([token_id], skip_special_tokens=False)
        return (self._backend.id_to_token(int(token_id)) or "").replace("▁", " ")

    def token_bytes(self) -> list[bytes | None]:
        """The bytes that each token of the vocabulary adds to a text; None for special tokens and unused ids."""
        added = self._backend.get_added_tokens_decoder()
        table: list[bytes | None] = [None] * self.vocab_size
        for text, token_id in self._backend.get_vocab(with_added_tokens=True).items():
            if token_id not in self.special_ids and token_id < self.vocab_size:
                table[token_id] = text.encode() if token_id in added else self._bytes_of(text)
        return table

    def _bytes_of(self, text: str) -> bytes:
        """Of a token as the vocabulary spells it."""
        if self._byte_level:
            return text.translate(_BYTE_OF).encode("latin-1")
        if (byte := re.fullmatch("<0x([0-9A-F]{2})>", text)) is not None:
            return bytes.fromhex(byte[1])
        return text.replace("▁", " ").encode()

    @property
    def has_chat_template(self) -> bool:
        """Whether render_chat can work."""
        return self._chat_template is not None

    @property
    def template_reads_tools(self) -> bool:
        """Whether render_chat can show tools to the model."""
        return self._chat_template is not None and self._chat_template.reads_tools

    def template_mentions(self, text: str) -> bool:
        """Whether the chat template writes or looks for a text, such as a tag."""
        return self._chat_template is not None and self._chat_template.mentions(text)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text of a conversation; encode it with add_special_tokens=False, as encode_chat does.

        tools: descriptions of functions, where the template reads them. variables: what else the template may name.
        Raises ConfigError for a model without a template or a template that fails, PromptError for malformed messages.
        """
        if self._chat_template is None:
            raise ConfigError("the model has no chat template (a base model?): use generate with a plain prompt.")
        return self._chat_template.render(
            messages, add_generation_prompt=add_generation_prompt, tools=tools, variables=variables
        )

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> list[int]:
        """Token ids of a conversation. Raises as render_chat does."""
        text = self.render_chat(messages, add_generation_prompt=add_generation_prompt)
        return self.encode(text, add_special_tokens=False)  # the template writes the special tokens itself

    @property
    def fingerprint(self) -> str:
        """Equal for two tokenizers if and only if every id means the same token."""
        digest = hashlib.sha256()
        for token, token_id in sorted(
            self._backend.get_vocab(with_added_tokens=True).items(), key=lambda item: item[1]
        ):
            digest.update(f"{token_id} {token}\n".encode("utf-8", "surrogatepass"))
        return digest.hexdigest()


def _gguf_id(metadata: Mapping[str, Any], name: str) -> int | None:
    token_id = metadata.get(f"tokenizer.ggml.{name}_token_id")
    if token_id is None:
        return None
    if not isinstance(token_id, int) or not 0 <= token_id < len(metadata["tokenizer.ggml.tokens"]):
        raise CorruptFileError(f"the GGUF's {name}_token_id {token_id!r} is not a token: download the file again.")
    return token_id


def _backend_from_folder(folder: Path) -> Backend:
    from tokenizers import Tokenizer as Backend

    path = folder / "tokenizer.json"
    if path.is_file():
        try:
            return Backend.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            reason = str(error).splitlines()[0][:200]
            raise CorruptFileError(f"{path} is malformed ({reason}): download the model again.") from error
    if not any((folder / name).is_file() for name in _SLOW_FILES):
        raise CorruptFileError(f"{folder} has no tokenizer.json: put the model's tokenizer files beside its weights.")
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise MissingDependencyError(
            f"{folder} has no tokenizer.json, and converting its older files needs transformers: "
            "pip install 'paceline[bench]'."
        ) from error
    try:
        return AutoTokenizer.from_pretrained(str(folder)).backend_tokenizer
    except Exception as error:  # conversion can fail in any of several libraries
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise CorruptFileError(f"the tokenizer files in {folder} cannot be converted ({reason[0][:200]}).") from error


def _folder_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text("utf-8")
        except UnicodeDecodeError as error:
            raise CorruptFileError(f"{path} is not UTF-8 text ({error.reason}): download the model again.") from error
    template = settings.get("chat_template") or _read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(template, list):  # named templates
        if not all(isinstance(entry, dict) and isinstance(entry.get("name"), str) for entry in template):
            raise CorruptFileError(f"{folder} has a chat_template without a name: download the model again.")
        template = {entry["name"]: entry.get("template") for entry in template}.get("default")
    return template if isinstance(template, str) else None


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty where there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CorruptFileError(f"{path} is not valid JSON ({error}): download the model again.") from error
    if not isinstance(value, dict):
        raise CorruptFileError(f"{path} is not a JSON object: download the model again.")
    return value


def _token_text(value: Any) -> str | None:
    if isinstance(value, dict):  # an AddedToken written out
        value = value.get("content")
    if not isinstance(value, str):
        return None
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise CorruptFileError(
            f"tokenizer_config.json has the special token {value!r:.80}, not valid Unicode: download the model again."
        ) from error
    return value


def _as_ids(value: Any) -> list[int]:
    return [i for i in (value if isinstance(value, list) else [value]) if isinstance(i, int)]
