"""OpenVINO GenAI's LLMPipeline on the GGUF file and token ids that Paceline is given.

usage: openvino_pipeline.py [MODEL] --prompts FILE [--per-category N] [--max-tokens N] [--prompt-lookup]
       [--perplexity FILE]
Greedy, one request at a time, the pipeline's defaults. Prints one JSON line.
"""

from __future__ import annotations

import time
from typing import Any

import environment
from measuring import CHUNK_TOKENS, Output, measure, perplexity

VERSION = "2026.4.0"
INSTALL = [
    # The libraries of one release: another patch of openvino does not load.
    [f"openvino-genai=={VERSION}.0", f"openvino-tokenizers=={VERSION}.0", f"openvino=={VERSION}", "numpy==2.4.6"],
]
MAX_NGRAM = 3


def report(workload: dict[str, Any]) -> dict[str, Any]:
    import numpy as np
    import openvino_genai
    from openvino import Tensor

    lookup = workload["draft_tokens"] > 0
    extra = {"prompt_lookup": True} if lookup else {}
    pipeline = openvino_genai.LLMPipeline(workload["model"], "CPU", INFERENCE_NUM_THREADS=workload["threads"], **extra)
    config = openvino_genai.GenerationConfig()
    config.do_sample = False
    config.stop_token_ids = set(workload["eos_ids"])
    if lookup:
        config.num_assistant_tokens = workload["draft_tokens"]
        config.max_ngram_size = MAX_NGRAM

    def generate(prompt_ids: list[int], max_tokens: int) -> Output:
        config.max_new_tokens = max_tokens
        inputs = Tensor(np.array([prompt_ids], dtype=np.int64))
        start = time.perf_counter()
        result = pipeline.generate(inputs, config)
        seconds = time.perf_counter() - start
        return Output(list(result.tokens[0]), result.perf_metrics.get_ttft().mean / 1e3, seconds)

    mode = "prompt lookup" if lookup else "plain"
    result = {"system": f"OpenVINO GenAI {VERSION} {mode}", **measure(workload, generate)}
    if workload["perplexity_ids"]:
        result["perplexity"] = measure_perplexity(workload)
    return result


def measure_perplexity(workload: dict[str, Any]) -> dict[str, Any]:
    """By the engine underneath the pipeline, which can echo a prompt with its log-probabilities."""
    import numpy as np
    import openvino_genai
    from openvino import Tensor

    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = 1  # GB
    scheduler.max_num_batched_tokens = CHUNK_TOKENS
    properties = {"INFERENCE_NUM_THREADS": workload["threads"]}
    engine = openvino_genai.ContinuousBatchingPipeline(workload["model"], scheduler, "CPU", properties)
    config = openvino_genai.GenerationConfig()
    config.do_sample = False
    config.echo = True
    config.logprobs = config.max_new_tokens = 1

    def log_likelihood(ids: list[int]) -> float:
        handle = engine.add_request(0, Tensor(np.array([ids], dtype=np.int64)), config)
        while engine.has_non_finished_requests():
            engine.step()
        [output] = handle.read_all()
        return sum(output.generated_log_probs[1 : len(ids)])  # the first token has no law; the last is the new one

    return perplexity(workload["perplexity_ids"], log_likelihood)


if __name__ == "__main__":
    environment.main(__file__, INSTALL, report, usage=__doc__)
