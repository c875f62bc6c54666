"""LLM: a model that answers prompts, with speculative decoding or without."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Any, Self, TypeGuard, cast

import numpy as np

import paceline
from paceline import costs, drafters, verify
from paceline.config import EngineConfig, SpeculationConfig
from paceline.control.policy import CostPolicy
from paceline.engine.counters import counters
from paceline.engine.engine import Engine
from paceline.engine.interrupt import deferred_interrupt
from paceline.engine.probe import forced_tokens, last_row
from paceline.engine.progress import BatchProgress
from paceline.engine.trace import FORMAT, TraceFile, TraceHeader
from paceline.engine.traced import TracedEngine
from paceline.errors import CacheError, ConfigError, PromptError
from paceline.interfaces import Runner
from paceline.models import runners
from paceline.params import SamplingParams
from paceline.sampling.sampler import race_margin
from paceline.types import Delta, RequestOutput

if TYPE_CHECKING:
    from paceline.models.loader import LoadedModel

_NO_PROMPT = "a prompt is text or a list of token ids, and several are a list of these; got {}."
_NO_CHAT = 'a conversation is a list of {{"role": ..., "content": ...}}, and several are a list of these; got {}.'

Message = Mapping[str, Any]
Prompt = str | Sequence[int]


class LLM:
    """A target model, optionally with a drafter, that completes prompts. Not for use from several threads at once.

    `with LLM(...) as llm:` closes it at the end, which matters where a drafter saves something.

    model: a catalog name (`paceline models`), a folder of Hugging Face files, a GGUF file, a hub id, a LoadedModel, or
    another LLM: on the native engine the weights are then in memory once, for both.
    speculation: what `SpeculationConfig.parse` reads, e.g. "ngram" or {"method": "draft_model", "model": "..."};
    it takes the place of the config's. progress: show bars while a model is fetched. trace: a file for what each step
    does, drafts and probabilities included, to be read by `paceline trace`; it slows decoding down. step_details:
    requests may ask for such descriptions of their own steps, which the deltas of `stream` carry.

    Raises ModelError if the model cannot be had, CacheError if the K/V budget is too small, DraftMismatchError if the
    drafter does not fit, MissingDependencyError if no engine is installed, ConfigError for a wrong setting.
    """

    def __init__(
        self,
        model: str | PathLike[str] | LoadedModel | LLM,
        *,
        config: EngineConfig | None = None,
        speculation: str | Mapping[str, Any] | SpeculationConfig | None = None,
        progress: bool = True,
        trace: str | PathLike[str] | None = None,
        step_details: bool = False,
    ) -> None:
        twin = model if isinstance(model, LLM) else None
        config = config or (twin.config if twin is not None else EngineConfig())
        if speculation is not None:
            config = replace(config, speculation=SpeculationConfig.parse(speculation))
        self.config = config = runners.resolve(config)
        if twin is not None:
            _check_weights(config, twin.config)
        trace_file = None if trace is None else TraceFile(trace)  # before the model: that takes long to load
        self._model = _load(model, progress=progress)
        self.tokenizer = self._model.tokenizer
        self.runner = runners.create_runner(
            self._model,
            config,
            cache=config.cache,
            max_model_len=config.max_model_len,
            progress=progress,
            twin=None if twin is None else twin.runner,
        )
        _check_room(config, self.runner)
        rule = config.speculation
        verifier = verify.create(rule.verification, epsilon=rule.typical_epsilon, alpha=rule.typical_alpha)
        describing = step_details or trace_file is not None
        self.engine = (partial(TracedEngine, trace=trace_file) if describing else Engine)(
            self.runner,
            tokenizer=self.tokenizer,
            verifier=verifier,
            drafter=drafters.create(
                config, target=self._model, runner=self.runner, verifier=verifier, progress=progress
            ),
            controller=CostPolicy(costs.of(self._model, config, self.runner)) if rule.adaptive else None,
            max_draft_tokens=rule.max_draft_tokens,
            max_predicted_tokens=rule.max_predicted_tokens,
            scheduler=config.scheduler,
            cache=config.cache,
        )
        if trace_file is not None:
            trace_file.write(TraceHeader(FORMAT, paceline.__version__, self.model_card, runners.settings(config)))
        self._deltas: dict[str, deque[Delta]] = {}
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Takes no more requests, and lets the drafter save what it keeps. Once it is closed, does nothing.

        Raises ConfigError if the file of a drafter cannot be written; then it is not closed.
        """
        if not self._closed and self.engine.drafter is not None:
            self.engine.drafter.close()
        self._closed = True

    @property
    def lossless(self) -> bool:
        """The verification rule in force keeps the target's law exactly."""
        return self.engine.verifier.lossless

    @property
    def model_card(self) -> str:
        """One line: name, precision of the weights, engine, type and size of the K/V cache, a note on the drafter."""
        kv = self.runner.kv
        tokens, mebibytes = kv.num_blocks * kv.block_size, kv.num_blocks * kv.bytes_per_block / 2**20
        kv_dtype = runners.kv_dtype(self.config)
        note = f"; {self.engine.drafter.note}" if self.engine.drafter and self.engine.drafter.note else ""
        return (
            f"{self._model.name}, {runners.describe(self._model, self.config, self.runner)}; "
            f"KV cache {kv_dtype} up to {tokens:,} tokens ({mebibytes:,.0f} MiB), context {self.runner.max_model_len:,}"
            + note
        )

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Completes each prompt (text, or token ids), all in one batch; outputs come in the order of the prompts.

        Raises PromptError or ConfigError before anything is computed if one of them cannot be run.
        """
        if not isinstance(prompts, (str, list, tuple, np.ndarray)):
            raise PromptError(_NO_PROMPT.format(type(prompts).__name__))
        single = isinstance(prompts, str) or _is_ids(prompts)
        batch = cast("list[Prompt]", [prompts] if single else list(prompts))
        return self._run([self._encode(prompt) for prompt in batch], params, progress=progress)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Answers one conversation or several: lists of {"role": ..., "content": ...}, through the chat template."""
        if not isinstance(messages, (list, tuple)):
            raise PromptError(_NO_CHAT.format(type(messages).__name__))
        conversations = cast("list[Sequence[Message]]", [messages] if _is_messages(messages) else list(messages))
        return self._run([self._encode_chat(c) for c in conversations], params, progress=progress)

    def stream(self, prompt: Prompt | Sequence[Message], params: SamplingParams | None = None) -> Iterator[Delta]:
        """Yields what each step adds: text of whole characters, tokens and where they came from.

        A list of messages is a chat. The last delta carries the whole output. Closing the iterator cancels the request.
        """
        encoded = self._encode_chat(prompt) if _is_messages(prompt) else self._encode(cast("Prompt", prompt))
        params = SamplingParams() if params is None else params
        self.engine.check_request(encoded[0], params)
        return self._stream(*encoded, params)

    def race_margin(
        self,
        token_ids: Sequence[int],
        params: SamplingParams,
        *,
        prompt_length: int,
        seed: int,
        stream: int = 0,
    ) -> float:
        """Log gap between the two best candidates (race scores; logits when greedy) for the token after token_ids.

        A gap within rounding of zero is a tie: there two packings of the same pass may choose differently.
        """
        logits, sampling = last_row(
            self.engine, np.asarray(token_ids, np.int32), params, prompt_length=prompt_length, seed=seed, stream=stream
        )
        return race_margin(logits, sampling)

    def forced_tokens(self, output: RequestOutput, params: SamplingParams) -> list[int]:
        """What the target samples at the place of each token of an output's first choice, when the output is fed to it
        in one pass: the same tokens, where no decoding has gone astray."""
        prompt, own = (np.asarray(ids, np.int32) for ids in (output.prompt_token_ids, output.token_ids))
        return forced_tokens(self.engine, prompt, own, params, seed=output.seed).tolist()

    def encode_prediction(self, text: str) -> tuple[int, ...]:
        """Tokens of a text that an answer will resemble, for `SamplingParams.prediction`.

        Where an answer departs from it its tokens may be cut otherwise for a while; drafting finds its place again.
        """
        return tuple(self.tokenizer.encode(text, add_special_tokens=False))

    def metrics(self) -> dict[str, int]:
        """Counters of speculation over all requests so far, under the names of docs/glossary.md."""
        return counters(self.engine.metrics)

    def _stream(self, token_ids: list[int], text: str | None, params: SamplingParams) -> Iterator[Delta]:
        finished = False
        request_id = self._add(token_ids, text, params, stream=True)  # here, so that a stream never begun costs nothing
        try:
            while not finished:
                if not self._deltas[request_id]:
                    with deferred_interrupt():
                        self._step()
                while self._deltas[request_id]:
                    delta = self._deltas[request_id].popleft()
                    finished = delta.output is not None
                    yield delta
        finally:
            self._drop(request_id)

    def _run(
        self,
        prompts: list[tuple[list[int], str | None]],
        params: SamplingParams | Sequence[SamplingParams] | None,
        *,
        progress: bool,
    ) -> list[RequestOutput]:
        all_params = _spread(params, len(prompts))
        outputs: dict[str, RequestOutput] = {}
        request_ids: list[str] = []
        bar = BatchProgress(len(prompts), shown=progress)
        try:
            for (token_ids, text), own in zip(prompts, all_params, strict=True):
                request_ids.append(self._add(token_ids, text, own, stream=False))
            with bar, deferred_interrupt() as raise_pending:
                while len(outputs) < len(request_ids):
                    self._step()
                    raise_pending()
                    for request_id in request_ids:
                        while self._deltas[request_id]:
                            output = self._deltas[request_id].popleft().output
                            if output is not None:
                                outputs[request_id] = output
                                bar.advance(output)
        finally:
            for request_id in request_ids:
                self._drop(request_id)
        return [outputs[request_id] for request_id in request_ids]

    def _add(self, token_ids: list[int], text: str | None, params: SamplingParams, *, stream: bool) -> str:
        if self._closed:
            raise PromptError("this LLM is closed and takes no more requests: make another one.")
        request_id = self.engine.add_request(token_ids, params, prompt=text, stream=stream)
        self._deltas[request_id] = deque()
        return request_id

    def _step(self) -> None:
        """One step for everybody; each request's deltas wait for it. For a block that holds interrupts back."""
        for delta in self.engine.step():
            self._deltas[delta.request_id].append(delta)

    def _drop(self, request_id: str) -> None:
        self.engine.abort(request_id)
        self._deltas.pop(request_id, None)

    def _encode(self, prompt: Prompt) -> tuple[list[int], str | None]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt), prompt
        if isinstance(prompt, (list, tuple, np.ndarray)) and (len(prompt) == 0 or _is_ids(prompt)):
            return [int(token_id) for token_id in prompt], None
        raise PromptError(_NO_PROMPT.format(f"{prompt!r:.60}"))

    def _encode_chat(self, messages: Sequence[Message]) -> tuple[list[int], str | None]:
        if not _is_messages(messages):
            raise PromptError(_NO_CHAT.format(f"{messages!r:.60}"))
        text = self.tokenizer.render_chat([dict(m) for m in messages])
        return self.tokenizer.encode(text, add_special_tokens=False), text


def _load(model: str | PathLike[str] | LoadedModel | LLM, *, progress: bool) -> LoadedModel:
    from paceline.models.loader import LoadedModel, load

    if isinstance(model, LLM):
        return model._model
    if isinstance(model, LoadedModel):
        return model
    if isinstance(model, (str, PathLike)):
        return load(str(model), progress=progress)
    raise ConfigError(f"model must be a name, a path or a LoadedModel; got {type(model).__name__}: try 'smollm2-135m'.")


def _check_weights(config: EngineConfig, other: EngineConfig) -> None:
    """Raises ConfigError if weights of one would not be those of the other."""
    for name in ("engine", "device", "dtype", "quantization"):
        if getattr(config, name) != getattr(other, name):
            raise ConfigError(
                f"an LLM made of another one shares its weights, so {name} must be {getattr(other, name)!r}; got "
                f"{getattr(config, name)!r}: give the model's name instead."
            )


def _check_room(config: EngineConfig, runner: Runner) -> None:
    """Raises CacheError if the K/V budget holds fewer tokens than max_model_len asks for."""
    if config.max_model_len is not None and runner.max_model_len < config.max_model_len:
        needed = -(-config.max_model_len // runner.kv.block_size) * runner.kv.bytes_per_block
        raise CacheError(
            f"the KV budget holds {runner.max_model_len:,} tokens, max_model_len is {config.max_model_len:,}: "
            f"give kv_cache_memory {needed:,} bytes, or lower max_model_len."
        )


def _spread(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [SamplingParams() if params is None else params] * count
    if not isinstance(params, (list, tuple)):
        raise ConfigError(f"params must be SamplingParams, or a list of them; got {type(params).__name__}.")
    if len(params) != count:
        raise ConfigError(f"{count} prompts came with {len(params)} SamplingParams: give one for all, or one each.")
    return list(params)


def _is_ids(prompt: object) -> TypeGuard[Sequence[int]]:
    if not isinstance(prompt, (list, tuple, np.ndarray)) or getattr(prompt, "ndim", 1) != 1 or len(prompt) == 0:
        return False
    return all(isinstance(token_id, (int, np.integer)) and not isinstance(token_id, bool) for token_id in prompt)


def _is_messages(prompt: object) -> TypeGuard[Sequence[Message]]:
    return isinstance(prompt, (list, tuple)) and len(prompt) > 0 and all(isinstance(m, Mapping) for m in prompt)
