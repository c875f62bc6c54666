"""The matched peer: transformers' generate on the prompts, weights and token ids that `paceline bench` uses.

usage: transformers_generate.py [MODEL] --prompts FILE [--per-category N] [--max-tokens N] [--prompt-lookup]
Greedy, one request at a time, bfloat16, chat template. Prints one JSON line. The weights come from Paceline's loader
(a GGUF file is dequantised once) into a LlamaForCausalLM in memory, and prompts are tokenised by Paceline, so that both
sides see the same model and the same ids.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, StoppingCriteria

from paceline.bench.workload import Prompt, read_prompts, select
from paceline.config import usable_cores
from paceline.models.loader import LoadedModel, load


class Clock(StoppingCriteria):
    """Never stops; notes when the first token is there."""

    def __init__(self) -> None:
        self.first_token: float | None = None

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        if self.first_token is None:
            self.first_token = time.perf_counter()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


def build(model: LoadedModel, *, dtype: torch.dtype) -> LlamaForCausalLM:
    """The same weights in transformers' own module."""
    spec = model.spec
    if spec.architecture != "llama":
        raise SystemExit(f"error: this peer is for Llama models; {model.name} is {spec.architecture}")
    rope = spec.ropes[0]
    assert rope is not None
    assert rope.scaling == "default", "the peer would need the same rope scaling"
    config = LlamaConfig(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        max_position_embeddings=spec.context_length,
        rms_norm_eps=spec.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": rope.theta},
        tie_word_embeddings=spec.tied_embeddings,
        eos_token_id=sorted(model.tokenizer.eos_ids),
    )
    network = LlamaForCausalLM(config)
    state = {name: torch.from_numpy(model.weights[name].copy()) for name in model.weights}
    missing, unexpected = network.load_state_dict(state, strict=False)
    assert set(missing) <= {"lm_head.weight"}, missing  # tied to the embeddings
    assert not unexpected, unexpected
    network.tie_weights()
    return network.to(dtype).eval()


def run(
    network: LlamaForCausalLM, prompt_ids: list[int], *, max_tokens: int, lookup: int | None
) -> tuple[list[int], float, float]:
    """Output ids, seconds to the first token, seconds of the whole request."""
    clock = Clock()
    inputs = torch.tensor([prompt_ids])
    extra = {} if lookup is None else {"prompt_lookup_num_tokens": lookup}
    start = time.perf_counter()
    with torch.inference_mode():
        ids = network.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=max_tokens,
            do_sample=False,
            pad_token_id=0,
            stopping_criteria=[clock],
            **extra,
        )
    end = time.perf_counter()
    assert clock.first_token is not None
    return ids[0, len(prompt_ids) :].tolist(), clock.first_token - start, end - start


def section(requests: list[dict[str, Any]]) -> dict[str, Any]:
    """The fields of a `paceline bench` section."""
    tokens = sum(request["tokens"] for request in requests)
    wall_seconds = sum(request["seconds"] for request in requests)
    prefill_seconds = sum(request["prefill_seconds"] for request in requests)
    decode_seconds = wall_seconds - prefill_seconds
    return {
        "requests": len(requests),
        "tokens": tokens,
        "wall_seconds": wall_seconds,
        "prefill_seconds": prefill_seconds,
        "decode_seconds": decode_seconds,
        "tokens_per_second": tokens / wall_seconds,
        "decode_tokens_per_second": (tokens - len(requests)) / decode_seconds,
    }


def measure(
    network: LlamaForCausalLM, model: LoadedModel, prompts: list[Prompt], *, max_tokens: int, lookup: int | None
) -> dict[str, Any]:
    """All prompts, after a short warm-up."""
    prompt_ids = [model.tokenizer.encode_chat(prompt.messages) for prompt in prompts]
    run(network, prompt_ids[0], max_tokens=8, lookup=lookup)
    requests = []
    for prompt, own in zip(prompts, prompt_ids, strict=True):
        ids, prefill_seconds, seconds = run(network, own, max_tokens=max_tokens, lookup=lookup)
        requests.append(
            {
                "category": prompt.category,
                "tokens": len(ids),
                "prefill_seconds": prefill_seconds,
                "seconds": seconds,
            }
        )
    categories = dict.fromkeys(prompt.category for prompt in prompts)
    return section(requests) | {
        "by_category": {
            name: section([request for request in requests if request["category"] == name]) for name in categories
        }
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--per-category", type=int, default=2)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--prompt-lookup", action="store_true", help="draft 5 tokens by prompt lookup")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--threads", type=int, default=usable_cores())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    prompts = select(read_prompts(arguments.prompts), per_category=arguments.per_category)
    model = load(arguments.model)
    network = build(model, dtype=getattr(torch, arguments.dtype))
    lookup = 5 if arguments.prompt_lookup else None
    report = measure(network, model, prompts, max_tokens=arguments.max_tokens, lookup=lookup)
    print(json.dumps({"peer": f"transformers {transformers.__version__}", "dtype": arguments.dtype, **report}))


if __name__ == "__main__":
    main()
