"""`paceline verify`: does speculation leave the text alone? Plain and speculative ids, compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from paceline.bench import proof_page
from paceline.bench.equality import TIE_MARGIN, Equality, compare
from paceline.bench.proof import LAW_RULES, Check, Proving
from paceline.bench.workload import read_prompts, select
from paceline.cli import options
from paceline.cli.output import note, print_json, progress_bar
from paceline.config import at_least
from paceline.errors import ConfigError
from paceline.params import SamplingParams

_SAMPLES, _LEAST_SAMPLES, _MOST_SAMPLES = 400, 20, 1000


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
    samples: Annotated[
        int | None,
        typer.Option(help="Texts of each prompt, plain and speculative, where laws are compared; 400 if left out."),
    ] = None,
    proof: Annotated[
        str | None,
        typer.Option(help="Make all checks, greedy and sampled, and write a page about them.", metavar="FILE.html"),
    ] = None,
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

    The rules rejection and block keep the law of the text, not its ids, at a temperature above 0: then many short texts
    are written either way, and a two-sample test asks whether they come from one law.

    With --proof all of this is checked, greedy and at the temperature (0.8 if it is 0); besides, each token must be
    what the target chooses when the output is fed to it, and a target that drafts for itself must accept its drafts.
    """
    at_least("--concurrency", concurrency, 1)
    if samples is not None and not _LEAST_SAMPLES <= samples <= _MOST_SAMPLES:
        raise ConfigError(f"--samples must be {_LEAST_SAMPLES} to {_MOST_SAMPLES}; got {samples}: try {_SAMPLES}.")
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
    by_law = config.speculation.verification in LAW_RULES and (proof is not None or not params.greedy)
    if samples is not None and not by_law:
        raise ConfigError(
            f"--samples is for the rules {' and '.join(LAW_RULES)} at a temperature above 0, where laws are compared: "
            "leave it out."
        )
    if proof is not None:
        options.require_writable("--proof", proof)

    from paceline.llm import LLM

    with LLM(model, config=config, progress=True, trace=trace) as llm:
        note(llm.model_card)
        if proof is None and not by_law:
            with progress_bar("verifying", total=len(chosen)) as advance:
                equality = compare(llm, chosen, params=params, batch_size=concurrency, advance=advance)
            if as_json:
                print_json(equality_json(equality))
            else:
                _print(equality)
            return 0 if equality.holds else 1
        proving = Proving(model, llm, chosen, params=params, samples=samples or _SAMPLES, batch_size=concurrency)
        with progress_bar("proving", total=proving.num_rounds(thorough=proof is not None)) as advance:
            checks = proving.run(advance, thorough=proof is not None)
        if as_json:
            print_json(_checks_json(checks, lossless=llm.lossless))
        else:
            for check in checks:
                typer.echo(f"{proof_page.VERDICTS[check.holds]}: {check.name}: {check.found}")
            _say_lossy(llm.lossless)
        if proof is not None:
            prompts_used = f"{len(chosen)} of {prompts}, {max_tokens} new tokens, seed {seed}, {concurrency} at once"
            Path(proof).write_text(proof_page.render(checks, llm=llm, prompts=prompts_used), encoding="utf-8")
            note(f"written to {proof}")
    return 1 if any(check.holds is False for check in checks) else 0


def _checks_json(checks: Sequence[Check], *, lossless: bool) -> dict[str, object]:
    """Of several checks: where none compares ids, `identical` is null."""
    divergences = [own for check in checks for own in check.divergences or ()]
    compared = any(check.divergences is not None for check in checks)
    prompts = max(check.prompts for check in checks)
    return {
        "prompts": prompts,
        "identical": prompts - len({own.prompt_id for own in divergences}) if compared else None,
        "ties": sum(own.tie for own in divergences),
        "divergences": [asdict(own) for own in divergences],
        "lossless": lossless,
        "checks": [{"name": own.name, "holds": own.holds, "found": own.found} for own in checks],
    }


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
    _say_lossy(equality.lossless)


def _say_lossy(lossless: bool) -> None:
    if not lossless:
        typer.echo("the verification rule is lossy: the ids need not agree")
