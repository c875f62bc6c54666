"""vLLM's CPU build on the token ids that Paceline is given, and on the GGUF file's weights in bfloat16.

usage: vllm_cpu.py [MODEL] --prompts FILE [--per-category N] [--max-tokens N] [--prompt-lookup]
Greedy, one request at a time. Prints one JSON line. Its GGUF kernels are for GPUs, so the file is dequantised once,
into a folder beside the peer's environment. vllm_cpu.txt pins what is installed: all that it needs but torchvision,
torchaudio and torchcodec. torch has to be a CPU build; where the index has another, PIP_EXTRA_INDEX_URL can name
PyTorch's own.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import environment
from measuring import Output, measure

VERSION = "0.32.0"
INSTALL = [["--no-deps", *Path(__file__).with_suffix(".txt").read_text().split()]]
CONTEXT_TOKENS = 4096


def convert(model: Any) -> Path:
    """The model as a Hugging Face folder in bfloat16, kept for the next time."""
    from transformers_generate import build, torch

    from paceline.models.catalog import cache_folder

    folder = cache_folder() / "peers" / "bfloat16" / model.path.stem
    if not folder.is_dir():
        unfinished = folder.with_name(f"{folder.name}.unfinished")
        build(model, dtype=torch.bfloat16).save_pretrained(unfinished)
        unfinished.rename(folder)
    return folder


def report(workload: dict[str, Any]) -> dict[str, Any]:
    cores = sorted(os.sched_getaffinity(0))[: workload["threads"]]
    os.environ |= {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # no second process on so few cores
        "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
    }
    from vllm import LLM, SamplingParams

    lookup = workload["draft_tokens"] > 0
    speculative_config = {
        "method": "ngram",
        "num_speculative_tokens": workload["draft_tokens"],
        "prompt_lookup_min": 2,
        "prompt_lookup_max": 4,
    }
    llm = LLM(
        workload["model"],
        dtype="bfloat16",
        max_model_len=CONTEXT_TOKENS,
        max_num_seqs=4,
        skip_tokenizer_init=True,
        disable_log_stats=False,  # they hold the time of the first token
        speculative_config=speculative_config if lookup else None,
    )

    def generate(prompt_ids: list[int], max_tokens: int) -> Output:
        params = SamplingParams(
            temperature=0, max_tokens=max_tokens, stop_token_ids=workload["eos_ids"], detokenize=False
        )
        start = time.perf_counter()
        [output] = llm.generate([{"prompt_token_ids": prompt_ids}], params, use_tqdm=False)
        seconds = time.perf_counter() - start
        return Output(list(output.outputs[0].token_ids), output.metrics.first_token_latency, seconds)

    mode = "prompt lookup" if lookup else "plain"
    return {"system": f"vLLM {VERSION} {mode}, bfloat16", **measure(workload, generate)}


if __name__ == "__main__":
    environment.main(__file__, INSTALL, report, convert=convert, usage=__doc__, perplexity=False)
