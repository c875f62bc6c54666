"""Python's share of an engine step: what is left once the runner's passes and the drafter's guesses are taken out.

usage: overhead.py [--steps N] [--save]. Prints one JSON line, and saves it to results/overhead.json where asked to.
A toy model stands for the runner; its passes are timed and subtracted, so that scheduling, packing, verification,
commit and detokenisation are what is counted. The prompts repeat themselves, so that prompt lookup drafts in most
steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline import verify
from paceline.bench.environment import describe_environment
from paceline.config import CacheConfig, SchedulerConfig
from paceline.control.policy import FixedLength
from paceline.draft.ngram import NgramDrafter
from paceline.engine.engine import Engine
from paceline.params import SamplingParams
from paceline.testing import CharTokenizer, ToyModel

RESULTS = Path(__file__).parent / "results"
DRAFT_TOKENS = 5
PROMPT = "the same words, again and again: " * 4
LIMIT_MS = {1: 0.2 + 0.03, 16: 0.2 + 0.03 * 16}  # 0.2 ms a step and 0.03 ms a request


class Timed:
    """An object whose named method is timed; everything else is passed on."""

    def __init__(self, inner: Any, method: str) -> None:
        self._inner = inner
        self.seconds = 0.0
        setattr(self, method, self._timed(getattr(inner, method)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - start

        return run


def measure(requests: int, *, steps: int, temperature: float) -> dict[str, float]:
    """Medians over steps in which every request decodes."""
    tokenizer = CharTokenizer()
    model = ToyModel(vocab_size=tokenizer.vocab_size, order=1, num_blocks=4096, max_model_len=4096)
    runner = Timed(model, "forward")
    drafter = Timed(NgramDrafter(max_ngram=4, min_ngram=2), "propose")
    engine = Engine(
        runner,
        tokenizer=tokenizer,
        verifier=verify.create("coupled", epsilon=0.3, alpha=0.09),
        drafter=drafter,
        controller=FixedLength(DRAFT_TOKENS),
        max_draft_tokens=DRAFT_TOKENS,
        scheduler=SchedulerConfig(max_num_seqs=requests, max_num_batched_tokens=4096),
        cache=CacheConfig(prefix_caching=False),
    )
    params = SamplingParams(max_tokens=steps * (DRAFT_TOKENS + 1), temperature=temperature, seed=0, ignore_eos=True)
    prompt = tokenizer.encode(PROMPT)
    for _ in range(requests):
        engine.add_request(prompt, params, stream=False)
    engine.step()  # prefill
    overheads, tokens_before = [], _num_output(engine)
    for _ in range(steps):
        before = runner.seconds + drafter.seconds
        start = time.perf_counter()
        engine.step()
        overheads.append(time.perf_counter() - start - (runner.seconds + drafter.seconds - before))
    tokens = _num_output(engine) - tokens_before
    return {
        "requests": requests,
        "temperature": temperature,
        "overhead_ms": round(statistics.median(overheads) * 1e3, 4),
        "limit_ms": round(LIMIT_MS[requests], 4),
        "tokens_per_step": round(tokens / steps / requests, 2),
    }


def _num_output(engine: Engine) -> int:
    return sum(sequence.num_output for sequence in engine.scheduler.running)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save", action="store_true", help="write results/overhead.json too")
    arguments = parser.parse_args()
    cases = [measure(n, steps=arguments.steps, temperature=t) for n in LIMIT_MS for t in (0.0, 0.8)]
    report = {"steps": arguments.steps, "cases": cases, "environment": describe_environment()}
    if arguments.save:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "overhead.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
