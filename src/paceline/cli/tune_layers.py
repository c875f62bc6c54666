"""`paceline tune-layers`: which layers of a model to keep when it drafts for itself."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from paceline.bench.layer_agreement import LayerAgreement, Text
from paceline.bench.layer_costs import LONGEST_DRAFT, LayerCosts, measure_costs
from paceline.bench.layer_search import search
from paceline.bench.memo import Memo
from paceline.bench.runner import submit
from paceline.bench.workload import Prompt, read_prompts, select
from paceline.cli import options
from paceline.cli.output import note, print_json, progress_bar
from paceline.config import EngineConfig
from paceline.errors import ConfigError
from paceline.models import runners
from paceline.models.loader import load
from paceline.models.tuned_layers import TunedLayers, tuned_path, write_tuned
from paceline.params import SamplingParams

if TYPE_CHECKING:
    from paceline.llm import LLM


def tune_layers(
    model: options.Model,
    prompts: options.Prompts,
    limit: options.Limit = 8,
    per_category: options.PerCategory = None,
    category: options.Category = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens of each answer that the layers are compared on.")] = 64,
    engine: options.Engine = "auto",
    device: options.Device = "cpu",
    dtype: options.DType = "auto",
    quantization: options.Quantization = None,
    kv_cache_memory: options.KVCacheMemory = None,
    kv_cache_dtype: options.KVCacheDType = "auto",
    threads: options.Threads = None,
    as_json: options.AsJSON = False,
) -> int:
    """Find the layers with which a model drafts best for itself, for `--speculation layer_skip`.

    The model answers the prompts; then layers are left out one after another, each time the one that costs least
    agreement with these answers. The subset with the best estimated speed-up is kept under `PACELINE_HOME`, where
    `layer_skip` finds it. Prompts like your own give the best layers. Every layer takes a few passes over all answers;
    each result is saved at once, so after Ctrl-C the same command goes on where it was.
    """
    chosen = select(read_prompts(prompts), categories=category or (), per_category=per_category, limit=limit)
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    config = options.engine_config(
        engine=engine,
        device=device,
        dtype=dtype,
        quantization=quantization,
        kv_cache_memory=kv_cache_memory,
        kv_cache_dtype=kv_cache_dtype,
        threads=threads,
        max_num_seqs=1,
    )
    config = replace(config, cache=replace(config.cache, block_size=LONGEST_DRAFT))

    from paceline.llm import LLM

    loaded = load(model)
    if loaded.spec.num_layers < 2:
        raise ConfigError(f"{model} has one layer, which cannot be left out: draft by ngram.")
    llm = LLM(loaded, config=config)
    note(llm.model_card)
    file = tuned_path(loaded.path)
    search_file = file.with_suffix(".search.json")
    memo = Memo(search_file, key=_key(file.stem, chosen, params, llm.config))
    if memo.damaged:
        note(f"the results of an earlier run in {search_file} are damaged: starting afresh")
    if len(memo):
        note(f"going on after {len(memo)} results of an earlier run")
    texts = _answers(llm, chosen, params, memo)
    tuned = _tune(llm, texts, memo, name=model, num_layers=loaded.spec.num_layers)
    write_tuned(loaded.path, tuned)
    memo.forget()
    if as_json:
        print_json(asdict(tuned))
    else:
        _print(tuned, num_layers=loaded.spec.num_layers)
        note(f"kept in {file}")
    return 0


def _key(fingerprint: str, prompts: Sequence[Prompt], params: SamplingParams, config: EngineConfig) -> str:
    """What all results depend on. fingerprint: the model's."""
    parts = [fingerprint, [prompt.turns[0] for prompt in prompts], params.max_tokens, runners.settings(config)]
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _tune(llm: LLM, texts: Sequence[Text], memo: Memo, *, name: str, num_layers: int) -> TunedLayers:
    """The layers that draft best for these answers. name: the model's, as the user wrote it."""
    agreement = LayerAgreement(llm.runner, texts)
    costs = LayerCosts(**memo("costs", lambda: asdict(measure_costs(llm.runner, num_layers=num_layers))))
    with progress_bar("leaving out layers", total=None) as advance:

        def evaluate(layers: tuple[int, ...]) -> float:
            advance()
            return memo(",".join(map(str, layers)), lambda: agreement(layers))

        best = search(evaluate, num_layers=num_layers, costs=costs)
    return TunedLayers(
        model=name,
        layers=best.layers,
        num_speculative_tokens=best.draft_length,
        agreement=best.agreement,
        speedup=best.speedup,
        num_tokens=agreement.num_tokens,
    )


def _answers(llm: LLM, prompts: Sequence[Prompt], params: SamplingParams, memo: Memo) -> list[Text]:
    texts = []
    with progress_bar("answering", total=len(prompts)) as advance:
        for index, prompt in enumerate(prompts):
            value = memo(f"answer {index}", lambda prompt=prompt: _answer(llm, prompt, params))
            texts.append(Text(np.array(value["token_ids"], dtype=np.int32), value["prompt_length"]))
            advance()
    return texts


def _answer(llm: LLM, prompt: Prompt, params: SamplingParams) -> dict[str, Any]:
    [output] = submit(llm, [prompt], params, mode="plain")
    prompt_length = len(output.prompt_token_ids)
    return {"token_ids": [*output.prompt_token_ids, *output.token_ids], "prompt_length": prompt_length}


def _print(tuned: TunedLayers, *, num_layers: int) -> None:
    kept = ",".join(map(str, tuned.layers))
    typer.echo(
        f"{len(tuned.layers)} of {num_layers} layers guess {tuned.agreement:.0%} of {tuned.num_tokens} tokens: {kept}; "
        f"drafts of {tuned.num_speculative_tokens} should make decoding {tuned.speedup:.2f}x as fast"
    )
    if tuned.speedup < 1:
        typer.echo("slower than plain decoding on this machine: try another drafter")
