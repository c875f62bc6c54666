"""transformers' generate on the weights and token ids that Paceline is given. It runs in Paceline's own environment.

usage: transformers_generate.py [MODEL] --prompts FILE [--per-category N] [--max-tokens N] [--prompt-lookup]
       [--dtype D]
Greedy, one request at a time. Prints one JSON line. The weights come from Paceline's loader, which dequantises the GGUF
file, into transformers' own module, so that both sides see the same model.
"""

from __future__ import annotations

import json
import time
from typing import Any

import torch
import transformers
from measuring import Generate, Output, measure
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    StoppingCriteria,
)
from workload import create, parser

from paceline.models.loader import LoadedModel

FAMILIES = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen2": (Qwen2Config, Qwen2ForCausalLM)}


class Clock(StoppingCriteria):
    """Never stops; notes when the first token is there."""

    def __init__(self) -> None:
        self.first_token: float | None = None

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        if self.first_token is None:
            self.first_token = time.perf_counter()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


def build(model: LoadedModel, *, dtype: torch.dtype) -> PreTrainedModel:
    """The same weights in transformers' own module."""
    spec = model.spec
    if spec.architecture not in FAMILIES:
        raise SystemExit(f"error: {model.name} is {spec.architecture}; this peer runs {', '.join(FAMILIES)} only.")
    rope = spec.ropes[0]
    assert rope is not None
    assert rope.scaling == "default", "the peer would need the same rope scaling"
    make_config, make_network = FAMILIES[spec.architecture]
    config = make_config(
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
    network = make_network(config)
    state = {name: torch.from_numpy(model.weights[name].copy()) for name in model.weights}
    missing, unexpected = network.load_state_dict(state, strict=False)
    assert set(missing) <= {"lm_head.weight"}, missing  # tied to the embeddings
    assert not unexpected, unexpected
    network.tie_weights()
    return network.to(dtype).eval()


def generator(network: PreTrainedModel, *, draft_tokens: int) -> Generate:
    extra = {"prompt_lookup_num_tokens": draft_tokens} if draft_tokens else {}

    def generate(prompt_ids: list[int], max_tokens: int) -> Output:
        clock = Clock()
        inputs = torch.tensor([prompt_ids])
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
        seconds = time.perf_counter() - start
        assert clock.first_token is not None
        return Output(ids[0, len(prompt_ids) :].tolist(), clock.first_token - start, seconds)

    return generate


def main() -> None:
    options = parser(__doc__, perplexity=False)
    options.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    arguments = options.parse_args()
    workload, model = create(arguments)
    torch.set_num_threads(workload["threads"])
    network = build(model, dtype=getattr(torch, arguments.dtype))
    mode = "prompt lookup" if workload["draft_tokens"] else "plain"
    generate = generator(network, draft_tokens=workload["draft_tokens"])
    system = f"transformers {transformers.__version__} {mode}, {arguments.dtype}"
    print(json.dumps({"system": system, **measure(workload, generate)}))


if __name__ == "__main__":
    main()
