"""`paceline demo`: the same prompts plain and speculative, the tokens in the colours of their origin, and the clock."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.bench.equality import Divergence, find_divergence
from paceline.bench.report import summarize
from paceline.bench.runner import Mode, Sample, measure
from paceline.bench.workload import Prompt
from paceline.cli import options
from paceline.cli.output import ORIGIN_STYLES, Column, category_table, coloured, note, token_pieces
from paceline.params import SamplingParams

if TYPE_CHECKING:
    from rich.console import Console

    from paceline.llm import LLM

MODEL = "smollm2-135m"
MAX_TOKENS = 80
NOISE = 0.05  # of the ratio of two runs over all prompts, on a machine that does little else
_LETTER = (
    "Dear Mrs Alvarez, thank you for your letter of 3 March. We are glad to hear that the garden table arrived in good "
    "condition and that the assembly took less than an hour. The two missing screws were sent to you this morning."
)
_CLASS = """class Stack:
    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

    def pop(self):
        return self.items.pop()"""
PROMPTS = (  # prompt lookup has much to find in the first three and hardly anything in the last two
    Prompt("copy", "copy", (f"Repeat this letter word for word, without comments:\n\n{_LETTER}",)),
    Prompt("edit", "edit code", (f"Rename the class Stack to Pile:\n\n{_CLASS}",)),
    Prompt("quote", "quote", (f"{_LETTER}\n\nWhich sentence of the letter mentions the screws?",)),
    Prompt("explain", "explain", ("Why is the sky blue? Answer in a few sentences.",)),
    Prompt("invent", "invent", ("Write the beginning of a story about a lighthouse keeper.",)),
)

COLUMNS: tuple[Column, ...] = (
    ("plain", "plain", "decode_tokens_per_second"),
    ("speculative", "speculative", "decode_tokens_per_second"),
    ("speed-up", None, "decode_speedup"),
    ("whole request", None, "speedup"),
)


def demo() -> int:
    """See speculation work: nothing to choose, about a minute on two cores.

    Fetches SmolLM2-135M-Instruct if it is absent, answers five prompts plainly and speculatively with prompt lookup,
    and checks that the texts are the same.
    """
    from rich.console import Console

    from paceline.llm import LLM

    console = Console(highlight=False, soft_wrap=True)
    config = options.engine_config(speculation="ngram", prefix_caching=False)
    llm = LLM(MODEL, config=config, progress=True)
    note(llm.model_card)
    console.print(_legend())
    params = SamplingParams(max_tokens=MAX_TOKENS, seed=0)
    runs: dict[str, dict[Mode, Sample]] = {}

    def observe(sample: Sample) -> None:
        pair = runs.setdefault(sample.prompt.id, {})
        pair[sample.mode] = sample
        if len(pair) == 2:
            _show_answer(console, llm, pair)

    with console.status("warming up") as status:
        measurement = measure(
            [llm],
            PROMPTS,
            params=params,
            announce=lambda prompt, mode: status.update(f"{prompt.category}, {mode}"),
            observe=observe,
        )
    report = summarize(measurement)
    console.print()
    console.print(category_table(report, title="decoding, tokens/s", columns=COLUMNS))
    console.print(
        f"acceptance length {report['acceptance_length']:.2f}, acceptance rate {report['acceptance_rate']:.0%}"
    )
    console.print(_gain(report["decode_speedup"]))
    divergences = [
        found
        for pair in runs.values()
        if (
            found := find_divergence(
                llm, pair["plain"].prompt, pair["plain"].output, pair["speculative"].output, params
            )
        )
    ]
    return _show_verdict(console, divergences)


def _legend() -> str:
    meanings = {
        "accepted": "drafted, and the target agreed",
        "recovered": "the target's own token where the draft was wrong",
        "bonus": "the target's own after a draft that was right to its end",
    }
    lines = [f"  [{ORIGIN_STYLES[name]}]{name}[/]: {meaning}" for name, meaning in meanings.items()]
    return "\n".join([*lines, "  uncoloured: nothing was drafted"])


def _gain(speedup: float) -> str:
    """What the prompts together gained, in words that one run of each bears out."""
    if abs(speedup - 1) < NOISE:
        return f"[bold]no speed-up here[/]: {speedup:.2f}x is within what one run of each prompt varies by"
    if speedup < 1:
        return f"[bold]slower here[/], at {speedup:.2f}x: `paceline profile {MODEL}` tells what drafted tokens cost"
    return f"[bold]decoding is {speedup:.2f}x as fast[/], in one run of each prompt"


def _show_answer(console: Console, llm: LLM, pair: dict[Mode, Sample]) -> None:
    plain, speculative = pair["plain"], pair["speculative"]
    choice = speculative.output.outputs[0]
    console.print(f"\n[bold]{plain.prompt.category}[/] [dim]{_shortened(plain.prompt.turns[0])}[/]")
    console.print(coloured(token_pieces(llm.tokenizer, choice.token_ids), choice.origins))
    console.print(
        f"[dim]{len(choice.token_ids)} tokens: plain {plain.seconds:.1f} s, speculative {speculative.seconds:.1f} s; "
        f"{speculative.output.metrics.acceptance_length:.2f} tokens a target pass[/]"
    )


def _show_verdict(console: Console, divergences: list[Divergence]) -> int:
    for item in divergences:
        kind = "a floating-point tie" if item.tie else "not a tie"
        console.print(f"{item.prompt_id} differs at output token {item.position}, margin {item.margin:.1e}: {kind}")
    if not divergences:
        console.print(f"[bold green]The {len(PROMPTS)} texts are the same, token for token.[/]")
    return 0 if all(item.tie for item in divergences) else 1


def _shortened(text: str, width: int = 100) -> str:
    line = " ".join(text.split())
    return line if len(line) <= width else line[: width - 1] + "…"
