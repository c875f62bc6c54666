"""What predicted outputs are worth: files in which a name is changed, drafted from the file as it was.

usage: predictions.py MODEL [--changed N] [--only ID ...] [--method ngram] [--repeats N] [--save]. Decodes each answer
plainly, with the method alone and with a prediction on top, in turn, and prints one JSON line. Models too small to edit
a file are measured with --changed: they answer prompts.jsonl, and are predicted what they say themselves, but for one
token in N.
"""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from results_file import keep, name_of

from paceline import LLM, CacheConfig, EngineConfig, RequestOutput, SamplingParams
from paceline.bench.environment import describe_environment
from paceline.bench.workload import read_prompts

HERE = Path(__file__).parent
MODES = ("plain", "method", "prediction")
ASK = (
    "Rename the {kind} `{old}` to `{new}` in this file, and print the whole file, nothing else.\n\n```python\n{file}```"
)
MORE_TOKENS = 32  # that an edited file may have on top
ANSWER_TOKENS = 160  # of prompts.jsonl


def cases_of(llm: LLM, changed: int | None) -> dict[str, tuple[str, tuple[int, ...], int]]:
    """By name: the question, the prediction, and the most tokens to answer with."""
    if changed is None:
        lines = (HERE / "edits.jsonl").read_text(encoding="utf-8").splitlines()
        edits = {edit["id"]: edit for edit in map(json.loads, lines)}
        predictions = {name: llm.encode_prediction(edit["file"]) for name, edit in edits.items()}
        return {n: (ASK.format(**edits[n]), own, len(own) + MORE_TOKENS) for n, own in predictions.items()}
    firsts = {prompt.category: prompt for prompt in reversed(read_prompts(str(HERE / "prompts.jsonl")))}
    cases = {}
    for prompt in firsts.values():
        plain = SamplingParams(max_tokens=ANSWER_TOKENS, speculation=False)
        answer = llm.chat(prompt.messages, plain)[0].token_ids
        rng = random.Random(0)
        wrong = [rng.randrange(llm.runner.vocab_size) if rng.random() < 1 / changed else token for token in answer]
        cases[prompt.id] = prompt.turns[0], tuple(wrong), ANSWER_TOKENS
    return cases


def measure(llm: LLM, question: str, prediction: tuple[int, ...], *, max_tokens: int, repeats: int) -> dict[str, Any]:
    """Medians over the repeats of one answer; which mode goes first changes."""
    plain = SamplingParams(max_tokens=max_tokens, speculation=False)
    with_method = replace(plain, speculation=True)
    params = {"plain": plain, "method": with_method, "prediction": replace(with_method, prediction=prediction)}
    messages = [{"role": "user", "content": question}]
    llm.chat(messages, replace(with_method, max_tokens=8))
    outputs: dict[str, list[RequestOutput]] = {mode: [] for mode in MODES}
    for repeat in range(repeats):
        for mode in MODES[repeat % 3 :] + MODES[: repeat % 3]:
            outputs[mode] += llm.chat(messages, params[mode])
    seconds = {mode: median(output.decode_seconds for output in outputs[mode]) for mode in MODES}
    metrics = outputs["prediction"][0].metrics
    num_tokens = len(outputs["plain"][0].token_ids)
    return {
        "tokens": num_tokens,
        "identical": len({output.token_ids for mode in MODES for output in outputs[mode]}) == 1,
        "plain_tokens_per_second": round((num_tokens - 1) / seconds["plain"], 1),
        "speedup": {mode: round(seconds["plain"] / seconds[mode], 2) for mode in MODES[1:]},
        "acceptance_length": {mode: round(outputs[mode][0].metrics.acceptance_length, 2) for mode in MODES[1:]},
        "accepted_prediction_tokens": metrics.accepted_prediction_tokens,
        "rejected_prediction_tokens": metrics.rejected_prediction_tokens,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--changed", type=int, help="predict the plain answers but for one token in so many")
    parser.add_argument("--only", nargs="*", help="some of the cases, by id")
    parser.add_argument("--method", default="ngram", help="the engine's speculation, as in --speculation")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--save", action="store_true", help="write a file in results, too")
    arguments = parser.parse_args()
    config = EngineConfig(cache=CacheConfig(kv_cache_memory=512 << 20))  # prompts stay cached: decoding is measured
    llm = LLM(arguments.model, config=config, speculation=arguments.method)
    cases = {
        name: measure(llm, question, prediction, max_tokens=most, repeats=arguments.repeats)
        for name, (question, prediction, most) in cases_of(llm, arguments.changed).items()
        if not arguments.only or name in arguments.only
    }
    report = {
        "model": llm.model_card,
        "method": arguments.method,
        "changed": arguments.changed,
        "speedup": {mode: round(median(case["speedup"][mode] for case in cases.values()), 2) for mode in MODES[1:]},
        "cases": cases,
        "environment": describe_environment(),
    }
    if arguments.save:
        changed = "" if arguments.changed is None else f"-changed-{arguments.changed}"
        keep(report, f"predictions-{name_of(arguments.model)}{changed}")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
