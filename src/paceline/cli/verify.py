"""`paceline verify`: does speculation leave the text alone? Plain and speculative ids, compared."""

from __future__ import annotations

from dataclasses import asdict

import typer

from paceline.bench.equality import TIE_MARGIN, Equality, compare
from paceline.bench.workload import read_prompts, select
from paceline.cli import options
from paceline.cli.output import note, print_json, progress_bar
from paceline.config import SpeculationConfig, at_least
from paceline.errors import ConfigError
from paceline.params import SamplingParams


def verify(
    model: options.Model,
    prompts: options.Prompts,
    limit: options.Limit = None,
    per_category: options.PerCategory = None,
    category: options.Category = None,
    max_tokens: options.MaxTokens = 96,
    temperature: options.Temperature = 0.0,
    top_k: options.TopK = 0,
    top_p: options.TopP = 1.0,
    min_p: options.MinP = 0.0,
    seed: options.FixedSeed = 0,
    concurrency: options.Concurrency = 1,
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
    """Generate each prompt plainly and speculatively and compare the token ids.

    Exits with 1 unless all ids agree. On the torch engine a divergence where the two best scores differ by less than
    0.001 in log is a floating-point tie: it is listed with its margin, counted under `ties`, and does not fail the
    check. The native engine is equal to the bit, and any divergence fails.
    """
    at_least("--concurrency", concurrency, 1)
    params = SamplingParams(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, max_tokens=max_tokens, seed=seed
    )
    chosen = select(read_prompts(prompts), categories=category or (), per_category=per_category, limit=limit)
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
        prefix_caching=False,  # neither run may profit from the other
        max_num_seqs=concurrency,
    )
    options.require_drafter(config)
    _require_comparable(config.speculation, params)

    from paceline.llm import LLM

    with LLM(model, config=config, progress=True, trace=trace) as llm:
        note(llm.model_card)
        with progress_bar("verifying", total=len(chosen)) as advance:
            equality = compare(llm, chosen, params=params, batch_size=concurrency, advance=advance)
        if as_json:
            print_json(equality_json(equality))
        else:
            _print(equality)
    return 0 if equality.holds else 1


def _require_comparable(speculation: SpeculationConfig, params: SamplingParams) -> None:
    if speculation.verification in ("rejection", "block") and not params.greedy:
        raise ConfigError(
            f"verification {speculation.verification!r} keeps the law of the text, not its ids, at a temperature "
            'above 0: compare ids at --temperature 0, or with "verification": "coupled".'
        )


def equality_json(equality: Equality) -> dict[str, object]:
    """The JSON of `paceline verify`."""
    return {
        "prompts": equality.prompts,
        "identical": equality.identical,
        "ties": equality.ties,
        "divergences": [asdict(item) for item in equality.divergences],
        "lossless": equality.lossless,
        "tokens": equality.tokens,
    }


def _print(equality: Equality) -> None:
    for item in equality.divergences:
        verdict = f"a floating-point tie (under {TIE_MARGIN:g})" if item.tie else "NOT a tie"
        typer.echo(
            f"{item.prompt_id}: differs at output token {item.position} "
            f"(plain {item.plain_token}, speculative {item.speculative_token}), margin {item.margin:.2e}: {verdict}"
        )
    typer.echo(
        f"{equality.identical} of {equality.prompts} prompts identical, {equality.tokens} tokens, {equality.ties} ties"
    )
    if not equality.lossless:
        typer.echo("the verification rule is lossy: the ids need not agree")
