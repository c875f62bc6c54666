"""What an engine's arithmetic costs in quality: mean KL and perplexity against the same weights in float32.

usage: quality.py [MODEL] [--engine E] [--dtype D] [--quantization Q] [--kv-cache-dtype K] [--reference E] [--limit N]
       [--peer-llama] [--save]
Text of three kinds, all of it this repository's own: prose (README and docs), code (src), and a list. It is cut into
windows of 512 tokens, each computed on its own; where the tokenizer begins texts with a token, every window does. Each
token of a window but the first counts once. --save writes results/quality-MODEL.json. --peer-llama adds llama.cpp's
perplexity on the same token ids.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from results_file import keep, name_of

from paceline.bench.environment import describe_environment
from paceline.config import CacheConfig, EngineConfig, SchedulerConfig, usable_cores
from paceline.control.passes import chain_pass
from paceline.interfaces import Runner
from paceline.llm import LLM
from paceline.models.loader import LoadedModel, load

HERE = Path(__file__).parent
ROOT = HERE.parent
WINDOW_TOKENS = 512
CHUNK_TOKENS = 128  # of a pass: [128, V] logits of two engines are held at once
KINDS = ("prose", "code", "list")


def texts() -> dict[str, str]:
    """The text of each kind."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
    modules = sorted((ROOT / "src").rglob("*.py"))
    return {
        "prose": "\n\n".join(path.read_text("utf-8") for path in pages if path.name != "cli.md"),
        "code": "\n\n".join(path.read_text("utf-8") for path in modules),
        "list": stock_list(1000),
    }


def stock_list(rows: int) -> str:
    """A table of a bicycle shop's stock, comma-separated; the same at every call."""
    rng = random.Random(0)
    things = ("chain", "saddle", "front wheel", "rear wheel", "brake lever", "bottle cage", "pedal", "tyre", "bell")
    colours = ("black", "silver", "red", "blue", "white")
    towns = ("Ghent", "Oxford", "Utrecht", "Verona", "Girona", "Bergen")
    lines = ["number,article,colour,quantity,price,warehouse"]
    for number in range(1, rows + 1):
        article = f"{rng.choice(things)},{rng.choice(colours)}"
        lines.append(
            f"{number},{article},{rng.randrange(200)},{rng.randrange(100, 20000) / 100:.2f},{rng.choice(towns)}"
        )
    return "\n".join(lines) + "\n"


def windows(text: str, encode: Callable[[str], list[int]], *, count: int) -> np.ndarray:
    """The first windows of a text, at most `count`: [W, 512] int32, each with what the tokenizer begins a text with."""
    start = encode("")
    ids = encode(text)[len(start) :]
    own = WINDOW_TOKENS - len(start)
    rows = [[*start, *ids[at : at + own]] for at in range(0, len(ids) - own + 1, own)]
    return np.array(rows[:count], dtype=np.int32).reshape(-1, WINDOW_TOKENS)


@dataclass
class Sums:
    """Over the scored tokens of some windows, in nats."""

    tokens: int = 0
    nll: float = 0.0  # of the engine
    reference_nll: float = 0.0
    kl: float = 0.0  # KL(reference, engine) of each row's law

    def __add__(self, other: Sums) -> Sums:
        return Sums(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))

    def report(self) -> dict[str, Any]:
        return {
            "tokens": self.tokens,
            "perplexity": math.exp(self.nll / self.tokens),
            "reference_perplexity": math.exp(self.reference_nll / self.tokens),
            "mean_kl_nats": self.kl / self.tokens,
        }


def score(engine: Runner, reference: Runner, window: np.ndarray) -> Sums:
    """Both models on one window [512]: every row but the last, which nothing follows."""
    sums = Sums()
    rows = zip(logits(engine, window), logits(reference, window), strict=True)
    start = 0
    for own, exact in rows:
        targets = window[start + 1 : start + 1 + len(own)]
        start += len(own)
        own, exact = log_probabilities(own[: len(targets)]), log_probabilities(exact[: len(targets)])
        each = np.arange(len(targets))
        sums += Sums(
            tokens=len(targets),
            nll=-float(own[each, targets].sum(dtype=np.float64)),
            reference_nll=-float(exact[each, targets].sum(dtype=np.float64)),
            kl=float((np.exp(exact) * (exact - own)).sum(dtype=np.float64)),
        )
    return sums


def logits(runner: Runner, window: np.ndarray) -> Iterator[np.ndarray]:
    """[n, V] float32 of each chunk of a window."""
    for start in range(0, len(window), CHUNK_TOKENS):
        chunk = window[start : start + CHUNK_TOKENS]
        values = runner.forward(chain_pass(chunk, context=start, block_size=runner.kv.block_size)).logits
        assert values is not None
        yield values


def log_probabilities(rows: np.ndarray) -> np.ndarray:
    """log softmax of rows [n, V] float32."""
    shifted = rows - rows.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True, dtype=np.float64)).astype(np.float32)


def measure(engine: Runner, reference: Runner, text: dict[str, np.ndarray]) -> dict[str, dict[str, Any]]:
    """The report of each kind of windows [W, 512], and of all together."""
    by_kind: dict[str, Sums] = {}
    for kind, own in text.items():
        by_kind[kind] = sum((score(engine, reference, window) for window in own), Sums())
        print(f"{kind}: {by_kind[kind].report()}", file=sys.stderr)
    by_kind["all"] = sum(by_kind.values(), Sums())
    return {kind: sums.report() for kind, sums in by_kind.items()}


def llama_perplexity(model: LoadedModel, text: dict[str, np.ndarray]) -> dict[str, float]:
    """llama.cpp's perplexity of each kind and of all, on the same windows of the same file."""
    sys.path.insert(0, str(HERE / "peers"))
    import environment
    import llama_cpp_python as peer

    reports = {}
    for kind, own in {**text, "all": np.concatenate(list(text.values()))}.items():
        given = {
            "model": str(model.path.absolute()),
            "threads": usable_cores(),
            "prompts": [],  # nothing but the perplexity
            "perplexity_ids": own.flatten().tolist(),
        }
        report = json.loads(environment.run_inside(peer.__file__, peer.INSTALL, given))
        reports[kind] = report["perplexity"]["perplexity"]
    return reports


def table(results: dict[str, Any]) -> str:
    """The results in Markdown."""
    peer = results.get("llama_cpp_perplexity")
    head = ["text", "tokens", "perplexity, float32", "perplexity, engine", "mean KL, nats"] + ["llama.cpp"] * bool(peer)
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for kind, row in results["texts"].items():
        cells = [kind, f"{row['tokens']:,}"]
        cells += [f"{row[name]:.3f}" for name in ("reference_perplexity", "perplexity")]
        cells += [f"{row['mean_kl_nats']:.3g}"] + ([f"{peer[kind]:.3f}"] if peer else [])
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def create(model: LoadedModel, *, kv_cache_dtype: Any = "auto", **options: Any) -> LLM:
    """The model on an engine, with room for one window."""
    cache, scheduler = CacheConfig(kv_cache_dtype=kv_cache_dtype), SchedulerConfig(max_num_seqs=1)
    return LLM(model, config=EngineConfig(max_model_len=WINDOW_TOKENS, cache=cache, scheduler=scheduler, **options))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--engine", default="auto", help="the one that is measured")
    parser.add_argument("--dtype", default="auto", help="of the one that is measured")
    parser.add_argument("--quantization", help="of the one that is measured: int8 or int4, where the file has floats")
    parser.add_argument("--kv-cache-dtype", default="auto", help="of the one that is measured")
    parser.add_argument("--reference", default="auto", help="engine of the reference, which runs in float32")
    parser.add_argument("--limit", type=int, default=20_000, help="tokens of all kinds together, at most")
    parser.add_argument("--peer-llama", action="store_true")
    parser.add_argument("--save", action="store_true")
    given = parser.parse_args(arguments)
    count = given.limit // len(KINDS) // WINDOW_TOKENS
    if count < 1:
        parser.error(f"--limit must be at least {len(KINDS) * WINDOW_TOKENS}, a window of each kind; got {given.limit}")
    model = load(given.model)
    text = {kind: windows(text, model.tokenizer.encode, count=count) for kind, text in texts().items()}
    digest = hashlib.sha256(b"".join(own.tobytes() for own in text.values())).hexdigest()
    engine = create(
        model,
        engine=given.engine,
        dtype=given.dtype,
        quantization=given.quantization,
        kv_cache_dtype=given.kv_cache_dtype,
    )
    reference = create(model, engine=given.reference, dtype="float32")
    results = {
        "model": given.model,
        "engine": engine.model_card,
        "reference": reference.model_card,
        "window_tokens": WINDOW_TOKENS,
        "token_ids_sha256": digest,
        "texts": measure(engine.runner, reference.runner, text),
    }
    if given.peer_llama:
        results["llama_cpp_perplexity"] = llama_perplexity(model, text)
    results["environment"] = describe_environment()
    if given.save:
        keep(results, f"quality-{name_of(given.model)}")
    print(table(results))


if __name__ == "__main__":
    main()
