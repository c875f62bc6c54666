"""`paceline generate`: one prompt, one answer."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli import options
from paceline.cli.output import note, output_json, print_json, statistics_line, write_text
from paceline.errors import ConfigError, PromptError
from paceline.params import Grammar, SamplingParams
from paceline.types import RequestOutput

if TYPE_CHECKING:
    from paceline.llm import LLM


def generate(
    model: options.Model,
    prompt: Annotated[str, typer.Option(help="The prompt; - reads it from stdin.", metavar="TEXT")],
    raw: Annotated[bool, typer.Option("--raw", help="Send the text as it is, without the chat template.")] = False,
    system: Annotated[str | None, typer.Option(help="System message of the chat template.")] = None,
    max_tokens: options.MaxTokens = 256,
    temperature: options.Temperature = 0.0,
    top_k: options.TopK = 0,
    top_p: options.TopP = 1.0,
    min_p: options.MinP = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="Over prompt and output; 1 switches it off.")] = 1.0,
    presence_penalty: Annotated[float, typer.Option(help="Off each token that the output holds; 0 = off.")] = 0.0,
    frequency_penalty: Annotated[float, typer.Option(help="The same, per occurrence; 0 = off.")] = 0.0,
    stop: Annotated[list[str] | None, typer.Option(help="End before this string; may be given repeatedly.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on past the end-of-text token.")] = False,
    seed: options.Seed = None,
    n: Annotated[int, typer.Option(help="Choices.")] = 1,
    json_schema: Annotated[
        str | None, typer.Option(help="Answer in JSON that is valid against this schema.", metavar="FILE|JSON")
    ] = None,
    regex: Annotated[str | None, typer.Option(help="Answer with a text that matches this expression.")] = None,
    logprobs: Annotated[int | None, typer.Option(help="With --json: log-probabilities, and the top N.")] = None,
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
    as_json: options.AsJSON = False,
) -> int:
    """Answer one prompt: text on stdout, model card and statistics on stderr.

    An instruct model gets its chat template; --raw sends the text as it is.
    """
    if logprobs is not None and not as_json:
        raise ConfigError("--logprobs shows in JSON only and would be ignored: add --json.")
    params = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        stop=tuple(stop or ()),
        ignore_eos=ignore_eos,
        max_tokens=max_tokens,
        seed=seed,
        n=n,
        logprobs=logprobs,
        grammar=_grammar(json_schema, regex),
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
    text = read_prompt(prompt)

    from paceline.llm import LLM

    with LLM(model, config=config, progress=True, trace=trace) as llm:
        note(llm.model_card)
        output = _run(llm, _input(llm, text, raw=raw, system=system), params, live=not as_json)
        if as_json:
            print_json(output_json(output))
        note(statistics_line(output))
    return 0


def _grammar(json_schema: str | None, regex: str | None) -> Grammar | None:
    if json_schema is not None and regex is not None:
        raise ConfigError("--json-schema and --regex exclude each other: drop one of the two.")
    if regex is not None:
        return Grammar.regex(regex)
    if json_schema is None or json_schema.lstrip().startswith("{"):
        return None if json_schema is None else Grammar.json_schema(json_schema)
    try:
        return Grammar.json_schema(Path(json_schema).read_text("utf-8"))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"--json-schema {json_schema!r:.100} cannot be read ({reason}): give JSON or a file."
        ) from error


def read_prompt(prompt: str) -> str:
    """The prompt's text, from stdin for "-". Raises PromptError when it is empty or not UTF-8."""
    text = options.utf8_text("prompt", options.open_stdin().buffer.read() if prompt == "-" else prompt)
    if not text:
        raise PromptError("prompt is empty: give it some text.")
    return text


def _input(llm: LLM, text: str, *, raw: bool, system: str | None) -> str | list[dict[str, Any]]:
    if raw and system is not None:
        raise ConfigError("--raw sends the text as it is and would ignore --system: drop one of the two.")
    if raw or not llm.tokenizer.has_chat_template:
        if system is not None:
            raise ConfigError("this model has no chat template and would ignore --system: put it into the prompt.")
        return text
    messages = [{"role": "system", "content": system}] if system is not None else []
    return [*messages, {"role": "user", "content": text}]


def _run(llm: LLM, prompt: str | list[dict[str, Any]], params: SamplingParams, *, live: bool) -> RequestOutput:
    """The finished request; with live, its text is on stdout, as it arrives where that is a terminal."""
    streaming = live and params.n == 1 and sys.stdout.isatty()
    output = None
    for delta in llm.stream(prompt, params):
        if streaming:
            write_text(delta.text)
        output = delta.output or output
    assert output is not None, "a stream ends with the whole result"
    if live:
        texts = [""] if streaming else [choice.text for choice in output.outputs]
        write_text("\n\n".join(texts) + "\n")
    return output
