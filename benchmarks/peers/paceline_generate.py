"""Paceline itself, measured as its peers are.

usage: paceline_generate.py [MODEL] --prompts FILE [--per-category N] [--max-tokens N] [--perplexity FILE]
       [--engine E] [--dtype D] [--speculation none|NAME|JSON]
Greedy, one request at a time, prefix caching off. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import time
from importlib import metadata
from typing import Any

from measuring import Output, measure, perplexity
from workload import create, parser

from paceline import LLM, CacheConfig, EngineConfig, SamplingParams
from paceline.models.loader import LoadedModel
from paceline.types import SpeculationMetrics


def report(workload: dict[str, Any], model: LoadedModel, arguments: argparse.Namespace) -> dict[str, Any]:
    config = EngineConfig(
        engine=arguments.engine,
        dtype=arguments.dtype,
        num_threads=workload["threads"],
        cache=CacheConfig(prefix_caching=False),
    )
    llm = LLM(model, config=config, speculation=arguments.speculation)
    counted: list[SpeculationMetrics] = []

    def generate(prompt_ids: list[int], max_tokens: int) -> Output:
        start = time.perf_counter()
        [output] = llm.generate([prompt_ids], SamplingParams(max_tokens=max_tokens))
        seconds = time.perf_counter() - start
        counted.append(output.metrics)
        return Output(list(output.token_ids), output.prefill_seconds, seconds)

    def log_likelihood(ids: list[int]) -> float:
        [output] = llm.generate([ids], SamplingParams(max_tokens=1, prompt_logprobs=0))
        assert output.prompt_logprobs is not None
        return sum(token.logprob for token in output.prompt_logprobs if token is not None)

    result = {"system": title(llm), "model_card": llm.model_card, **measure(workload, generate)}
    if llm.config.speculation.method != "none":
        metrics = sum(counted[-len(workload["prompts"]) :], SpeculationMetrics())  # prefill runs came before
        result |= {"acceptance_length": metrics.acceptance_length, "acceptance_rate": metrics.acceptance_rate}
    if workload["perplexity_ids"]:
        result["perplexity"] = perplexity(workload["perplexity_ids"], log_likelihood)
    return result


def title(llm: LLM) -> str:
    """The name of the row: what drafts, and for the torch engine the precision that the file is dequantised to."""
    config = llm.config
    rule = config.speculation
    mode = "plain" if rule.method == "none" else rule.method
    mode += f" with {rule.model}" if rule.model is not None else ""
    if config.engine == "native":
        return f"Paceline {mode}"
    return f"Paceline on torch {metadata.version('torch')} {mode}, {config.dtype}"


def main() -> None:
    options = parser(__doc__, lookup=False)
    options.add_argument("--engine", default="native", choices=["native", "torch"])
    options.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16"])
    options.add_argument("--speculation", default="none")
    arguments = options.parse_args()
    workload, model = create(arguments)
    print(json.dumps(report(workload, model, arguments)))


if __name__ == "__main__":
    main()
