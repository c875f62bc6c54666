"""Paceline's server and others under load: writes results/serving-MODEL.json and the table of docs/serving.md.

usage: serving.py [--model M] [--only KEY ...] [--repeats N] [--max-tokens N] [--name NAME]
Every server is asked over its own OpenAI API, by one client, for greedy completions of the same token ids, none of
which it has seen before; prefix caches are off or of no use. In each repeat all servers are started, and sleep but
for the one that is measured, so that all of them meet the same machine. Then a long prompt arrives beside decoding
requests: how long do these wait? Peers are installed when first needed.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from http_client import Answer, complete, complete_all
from results_file import keep, name_of, renew
from serving_table import render

from paceline.bench.environment import describe_environment
from paceline.bench.workload import Prompt, read_prompts
from paceline.config import SchedulerConfig, usable_cores
from paceline.models.loader import LoadedModel, load

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "peers"))
from servers import CONTESTANTS, RunningServer, running  # noqa: E402  # a folder of scripts, not a package

PER_CATEGORY = {1: 1, 8: 2, 16: 4}  # prompts of each category by concurrency; no prompt is used twice
SHORT = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
NUM_DECODERS = 8
LONG_TOKENS = 3000  # of the prompt that arrives beside them
DECODERS_BEGUN = 8  # events that each of them has had by then


def workload(model: LoadedModel, prompts: list[Prompt], *, max_tokens: int) -> dict[int, list[dict[str, Any]]]:
    """Bodies of the requests, by concurrency; categories take turns."""
    by_category: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_category.setdefault(prompt.category, []).append(prompt)
    bodies: dict[int, list[dict[str, Any]]] = {}
    start = 0
    for concurrency, count in PER_CATEGORY.items():
        turns = [own[i] for i in range(start, start + count) for own in by_category.values()]
        ids = [model.tokenizer.encode_chat(prompt.messages) for prompt in turns]
        ends = {"stop_token_ids": sorted(model.tokenizer.eos_ids)}
        bodies[concurrency] = [{"prompt": own, "max_tokens": max_tokens, "temperature": 0, **ends} for own in ids]
        start += count
    return bodies


async def measure(
    server: RunningServer, bodies: dict[int, list[dict[str, Any]]], long_ids: list[int], fields: dict[str, Any]
) -> dict[str, Any]:
    """Throughput at each concurrency, then what a long prompt does to others."""
    for ids in (long_ids[1:601], long_ids[301:401]):  # thread pools, compiled shapes; no prefix of what follows
        await complete(server.port, {"prompt": ids, **SHORT, **fields})
    report: dict[str, Any] = {"load": {}}
    for concurrency, own in bodies.items():
        start = time.perf_counter()
        answers = await complete_all(server.port, [body | fields for body in own], concurrency=concurrency)
        seconds = time.perf_counter() - start
        report["load"][str(concurrency)] = summary(answers, seconds)
    return report | {"stall": await stall(server, long_ids, bodies[NUM_DECODERS], fields)}


def summary(answers: list[Answer], seconds: float) -> dict[str, Any]:
    tokens = sum(answer.num_tokens for answer in answers)
    return {
        "requests": len(answers),
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "first_token_milliseconds": percentiles([answer.first_token_seconds for answer in answers]),
        "milliseconds_per_token": percentiles([answer.seconds_per_token for answer in answers]),
        "milliseconds_between_events": percentiles([gap for answer in answers for gap in answer.gaps]),
        "texts": [answer.text for answer in answers],
    }


async def stall(
    server: RunningServer, long_ids: list[int], bodies: list[dict[str, Any]], fields: dict[str, Any]
) -> dict[str, Any]:
    """Gaps in the streams of NUM_DECODERS requests between the arrival of a long prompt and its first token."""
    alone = await complete(server.port, {"prompt": long_ids[::-1], **SHORT, **fields})
    shortest = sorted(bodies, key=lambda body: len(body["prompt"]))[:NUM_DECODERS]
    endless = {"max_tokens": 1000, "ignore_eos": True, "temperature": 0, **fields}
    decoders = [Answer(time.perf_counter()) for _ in shortest]
    tasks = [
        asyncio.ensure_future(complete(server.port, {"prompt": body["prompt"], **endless}, answer))
        for body, answer in zip(shortest, decoders, strict=True)
    ]
    while min(len(answer.chunk_times) for answer in decoders) < DECODERS_BEGUN:
        await asyncio.sleep(0.01)
        if failed := [task for task in tasks if task.done()]:
            failed[0].result()
    beside = await complete(server.port, {"prompt": long_ids, **SHORT, **fields})
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    begin, end = beside.sent_at, beside.chunk_times[0]
    gaps = [
        after - before
        for answer in decoders
        for before, after in zip(answer.chunk_times, answer.chunk_times[1:], strict=False)
        if after > begin and before < end
    ]
    return {
        "longest_milliseconds": 1e3 * max(gaps, default=0.0),
        "p95_milliseconds": percentiles(gaps)["p95"],
        "long_alone_milliseconds": 1e3 * alone.first_token_seconds,
        "long_beside_milliseconds": 1e3 * beside.first_token_seconds,
    }


def percentiles(seconds: list[float]) -> dict[str, float]:
    """In milliseconds; 0 where there was nothing to wait for, as when all tokens came in one event."""
    return {f"p{percent}": 1e3 * float(np.percentile(seconds or [0.0], percent)) for percent in (50, 95)}


def summarize(runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Of each server's repeats: rates and ratios as they were, the rest as medians; texts are compared and dropped."""
    reference = runs.get(CONTESTANTS["plain"].title)
    systems: dict[str, Any] = {}
    for title, own in runs.items():
        load = {}
        for concurrency, first in own[0]["load"].items():
            every = [run["load"][concurrency] for run in own]
            texts = [text for report in every for text in report["texts"]]
            load[concurrency] = {
                key: middle([report[key] for report in every])
                for key in first
                if key not in ("texts", "tokens_per_second")
            }
            load[concurrency]["tokens_per_second"] = [report["tokens_per_second"] for report in every]
            if reference is not None:
                plain = [text for run in reference for text in run["load"][concurrency]["texts"]]
                load[concurrency]["same_text_as_plain"] = sum(map(str.__eq__, texts, plain)) / len(texts)
        systems[title] = {"load": load, "stall": middle([run["stall"] for run in own])}
    return systems


def middle(values: list[Any]) -> Any:
    """The median, of dictionaries field by field."""
    if isinstance(values[0], dict):
        return {key: middle([value[key] for value in values]) for key in values[0]}
    return median(values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--only", nargs="+", choices=CONTESTANTS, metavar="KEY", help=f"of {', '.join(CONTESTANTS)}")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--name", help="of the file in results/; serving-MODEL, if left out: only that goes into docs")
    arguments = parser.parse_args()
    prompts = read_prompts(str(HERE / "prompts.jsonl"))
    model = load(arguments.model)
    bodies = workload(model, prompts, max_tokens=arguments.max_tokens)
    long_ids = model.tokenizer.encode("\n\n".join(turn for prompt in prompts for turn in prompt.turns))[:LONG_TOKENS]
    contestants = [CONTESTANTS[key] for key in arguments.only or CONTESTANTS]
    runs: dict[str, list[dict[str, Any]]] = {contestant.title: [] for contestant in contestants}
    for _ in range(arguments.repeats):
        with ExitStack() as stack:
            servers = [stack.enter_context(running(own, model, threads=arguments.threads)) for own in contestants]
            for contestant, server in zip(contestants, servers, strict=True):
                server.resume()
                report = asyncio.run(measure(server, bodies, long_ids, contestant.fields))
                server.pause()
                runs[contestant.title].append(report)
                rates = [round(own["tokens_per_second"], 1) for own in report["load"].values()]
                print(contestant.title, rates, report["stall"], file=sys.stderr)
    results = {
        "model": f"{arguments.model}, {model.precision}",
        "settings": {
            "max_tokens": arguments.max_tokens,
            "per_category": PER_CATEGORY,
            "repeats": arguments.repeats,
            "temperature": 0,
            "decoders": NUM_DECODERS,
            "long_prompt_tokens": LONG_TOKENS,
            "chunk_tokens": SchedulerConfig().max_num_batched_tokens,
        },
        "environment": describe_environment(),
        "systems": summarize(runs),
    }
    keep(results, arguments.name or f"serving-{name_of(arguments.model)}")
    table = render(results)
    print(table)
    if arguments.name is None:
        renew("docs/serving.md", table, name="benchmark")


if __name__ == "__main__":
    main()
