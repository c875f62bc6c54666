"""`paceline chat`: a conversation at the terminal."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli import options
from paceline.cli.guard import show_error
from paceline.cli.output import note, statistics_line, write_text
from paceline.errors import ConfigError, PromptError
from paceline.params import SamplingParams

if TYPE_CHECKING:
    from paceline.llm import LLM


def chat(
    model: options.Model = "smollm2-135m",
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    max_tokens: options.MaxTokens = 512,
    temperature: options.Temperature = 0.0,
    top_k: options.TopK = 0,
    top_p: options.TopP = 1.0,
    min_p: options.MinP = 0.0,
    seed: options.Seed = None,
    trace: options.Trace = None,
    config_file: options.ConfigFile = None,
    speculation: options.Speculation = options.DEFAULT_SPECULATION,
    engine: options.Engine = "auto",
    device: options.Device = "cpu",
    dtype: options.DType = "auto",
    quantization: options.Quantization = None,
    kv_cache_memory: options.KVCacheMemory = None,
    kv_cache_dtype: options.KVCacheDType = "auto",
    threads: options.Threads = None,
    max_model_len: options.MaxModelLen = None,
) -> int:
    """Talk with a model; speed and acceptance follow each answer.

    /reset forgets the conversation, /exit or Ctrl-D leaves. Ctrl-C stops an answer, a second one leaves.
    """
    params = SamplingParams(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, max_tokens=max_tokens, seed=seed
    )
    config = options.engine_config(
        engine=engine,
        device=device,
        dtype=dtype,
        quantization=quantization,
        speculation=speculation,
        kv_cache_memory=kv_cache_memory,
        kv_cache_dtype=kv_cache_dtype,
        threads=threads,
        max_model_len=max_model_len,
    )
    if system is not None:
        system = options.utf8_text("--system", system)
    options.open_stdin()

    from paceline.llm import LLM

    with LLM(model, config=config, progress=True, trace=trace) as llm:
        if not llm.tokenizer.has_chat_template:
            raise ConfigError(f"{model} has no chat template: use `paceline generate`, or an instruct model.")
        note(llm.model_card)
        note("/reset forgets the conversation, /exit leaves; Ctrl-C stops an answer.")
        Conversation(llm, params, system=system).run()
    return 0


class Conversation:
    """The messages so far, and the loop that adds to them."""

    def __init__(self, llm: LLM, params: SamplingParams, *, system: str | None) -> None:
        self._llm = llm
        self._params = params
        self._opening: list[dict[str, Any]] = [{"role": "system", "content": system}] if system is not None else []
        self._messages = list(self._opening)

    def run(self) -> None:
        """Reads messages until /exit or the end of input."""
        while True:
            try:
                text = _read()
            except UnicodeDecodeError as error:
                show_error(f"message is not valid UTF-8 at byte {error.start}: convert it first.")
                continue
            if text is None:
                return
            match text.strip():
                case "":
                    continue
                case "/exit":
                    return
                case "/reset":
                    self._messages = list(self._opening)
                    note("conversation forgotten")
                case command if command.startswith("/"):
                    show_error(f"no command {command!r}: there are /reset and /exit.")
                case message:
                    self._answer(message)

    def _answer(self, message: str) -> None:
        messages = [*self._messages, {"role": "user", "content": message}]
        said = ""
        line = "stopped"
        try:
            for delta in self._llm.stream(messages, self._params):
                said += delta.text
                write_text(delta.text)
                if delta.output is not None:
                    line = statistics_line(delta.output)
        except KeyboardInterrupt:
            pass  # what was said so far stays in the conversation
        except PromptError as error:
            show_error(f"{error} /reset forgets the conversation.")
            return
        write_text("\n")
        note(typer.style(line, dim=True))
        self._messages = [*messages, {"role": "assistant", "content": said}]


def _read() -> str | None:
    """The next message; None at the end of input, or at Ctrl-C. Raises UnicodeDecodeError."""
    stdin = options.open_stdin()
    if not stdin.isatty():
        return stdin.buffer.readline().decode() or None
    with contextlib.suppress(ImportError):  # not on every platform
        import readline  # noqa: F401  # its import gives input() line editing and history
    try:
        return input("\n> ")
    except (EOFError, KeyboardInterrupt):
        note("")
        return None
