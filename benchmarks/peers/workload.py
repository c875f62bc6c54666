"""What every system of a comparison is given: one GGUF file, prompts as token ids, limits.

A workload is a dictionary that JSON can hold: Paceline makes it, peers read it in environments of their own. It has
model (path of the GGUF file), name (the model as the user wrote it), threads, max_tokens, draft_tokens (0 = plain
decoding), eos_ids, prompts (list of {category, ids}), prefill_ids (PREFILL_TOKENS ids), perplexity_ids (may be empty).
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from paceline.bench.workload import read_prompts, select
from paceline.config import usable_cores
from paceline.models.loader import LoadedModel, load

PREFILL_TOKENS = 1000
DRAFT_TOKENS = 5


def parser(usage: str | None, *, lookup: bool = True, perplexity: bool = True) -> argparse.ArgumentParser:
    """The options that all systems share; without those two, for a system that cannot honour them."""
    made = argparse.ArgumentParser(description=usage, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("model", nargs="?", default="smollm2-135m")
    made.add_argument("--prompts", required=True, metavar="FILE")
    made.add_argument("--per-category", type=int, default=2)
    made.add_argument("--max-tokens", type=int, default=96)
    made.add_argument("--threads", type=int, default=usable_cores())
    made.set_defaults(prompt_lookup=False, perplexity=None)
    if lookup:
        made.add_argument("--prompt-lookup", action="store_true", help=f"draft {DRAFT_TOKENS} tokens by prompt lookup")
    if perplexity:
        made.add_argument("--perplexity", metavar="FILE", help="of this text, too")
    return made


def create(arguments: argparse.Namespace) -> tuple[dict[str, Any], LoadedModel]:
    """The workload that the parsed options describe, and the model, whose tokenizer made its ids."""
    prompts = read_prompts(arguments.prompts)
    model = load(arguments.model)
    if model.path.suffix != ".gguf":
        raise SystemExit(f"error: {arguments.model} is not a GGUF file, which all systems can read: give one.")
    encode = model.tokenizer.encode
    prefill_ids = encode("\n\n".join(turn for prompt in prompts for turn in prompt.turns))[:PREFILL_TOKENS]
    if len(prefill_ids) < PREFILL_TOKENS:
        raise SystemExit(f"error: {arguments.prompts} has fewer than {PREFILL_TOKENS} tokens: give more prompts.")
    text = "" if arguments.perplexity is None else Path(arguments.perplexity).read_text(encoding="utf-8")
    workload = {
        "model": str(model.path.absolute()),
        "name": arguments.model,
        "threads": arguments.threads,
        "max_tokens": arguments.max_tokens,
        "draft_tokens": DRAFT_TOKENS if arguments.prompt_lookup else 0,
        "eos_ids": sorted(model.tokenizer.eos_ids),
        "prompts": [
            {"category": prompt.category, "ids": model.tokenizer.encode_chat(prompt.messages)}
            for prompt in select(prompts, per_category=arguments.per_category)
        ],
        "prefill_ids": prefill_ids,
        "perplexity_ids": encode(text) if text else [],
    }
    return workload, model
