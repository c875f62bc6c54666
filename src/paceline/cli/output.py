"""What commands print: results as JSON, in a line or a table, tokens in the colours of their origin."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

from paceline.bench.runner import Mode
from paceline.engine.counters import summary
from paceline.engine.detokenizer import Decoder, Detokenizer
from paceline.types import Completion, RequestOutput, TokenLogprob

if TYPE_CHECKING:
    from rich.table import Table

ORIGIN_STYLES = {"accepted": "green", "recovered": "red", "bonus": "blue"}  # tokens decoded plainly keep their colour

Column = tuple[str, Mode | None, str]  # heading, mode (None: the ratio of the two), and name of a figure of a report


def note(message: str) -> None:
    """A line for the person at the terminal: stderr, so that stdout holds results alone."""
    typer.echo(message, err=True)


def print_json(value: dict[str, Any] | list[Any]) -> None:
    """One JSON document on stdout."""
    typer.echo(json.dumps(value, ensure_ascii=False))


def write_text(text: str) -> None:
    """Model text on stdout, at once; a character that the terminal's encoding lacks becomes a question mark."""
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, errors="replace").decode(encoding))
    sys.stdout.flush()


@contextmanager
def progress_bar(task: str, *, total: int | None) -> Iterator[Callable[[], None]]:
    """A bar on stderr, nothing where that is not a terminal; yields the function that adds one.

    total: None = nobody knows.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        handle = bar.add_task(task, total=total)
        yield lambda: bar.advance(handle)


def decode_rate(output: RequestOutput) -> float:
    """Tokens per second of all choices, but for their first tokens, whose time is prefill's; 0 when there are none."""
    tokens = num_tokens(output) - len(output.outputs)
    return tokens / output.decode_seconds if tokens > 0 and output.decode_seconds > 0 else 0.0


def num_tokens(output: RequestOutput) -> int:
    """Output tokens of all choices."""
    return sum(len(choice.token_ids) for choice in output.outputs)


def statistics_line(output: RequestOutput) -> str:
    """Tokens, seconds and speculation of one request, for stderr."""
    line = (
        f"{num_tokens(output)} tokens: prefill {output.prefill_seconds:.2f} s, "
        f"decoding {decode_rate(output):.1f} tokens/s"
    )
    if any(choice.finish_reason == "length" for choice in output.outputs):
        line = f"cut off at the limit of tokens; {line}"
    metrics = output.metrics
    if not metrics.num_drafts:
        return f"{line}, nothing drafted"
    return (
        f"{line}, acceptance length {metrics.acceptance_length:.2f} "
        f"({metrics.num_accepted_tokens} of {metrics.num_draft_tokens} drafted tokens accepted)"
    )


def output_json(output: RequestOutput) -> dict[str, Any]:
    """One finished request: the first choice at the top level, all of them under `choices`."""
    choices = [_choice_json(choice) for choice in output.outputs]
    return {
        "text": output.text,
        "token_ids": list(output.token_ids),
        "finish_reason": output.outputs[0].finish_reason,
        "choices": choices,
        "seed": output.seed,
        "lossless": output.lossless,
        "reproducible": output.reproducible,
        "num_prompt_tokens": len(output.prompt_token_ids),
        "num_cached_tokens": output.num_cached_tokens,
        "metrics": {"speculative_decoding": summary(output.metrics)},
        "timings": {
            "prefill_seconds": output.prefill_seconds,
            "decode_seconds": output.decode_seconds,
            "decode_tokens_per_second": decode_rate(output),
        },
    }


def category_table(report: dict[str, Any], *, title: str, columns: Sequence[Column]) -> Table:
    """A bench report as a rich Table: one row a category, and one over all."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column(title)
    for heading, _, _ in columns:
        table.add_column(heading, justify="right")
    for category in (*report["by_category"], None):
        cells = []
        for _, mode, figure in columns:
            section = report if mode is None else report[mode]
            value = (section if category is None else section["by_category"][category])[figure]
            cells.append(_times(value) if mode is None else f"{value:.1f}")
        if category is None:
            table.add_row("all", *cells, style="bold")
        else:
            table.add_row(category, *cells)
    return table


def token_pieces(decoder: Decoder, token_ids: Sequence[int]) -> list[str]:
    """The text that each token adds; a character spread over several tokens comes with its last."""
    detokenizer = Detokenizer(decoder, skip_special_tokens=True)
    pieces = []
    for token_id in token_ids:
        detokenizer.append([token_id])
        pieces.append(detokenizer.take())
    detokenizer.close()
    if pieces:
        pieces[-1] += detokenizer.take()
    return pieces


def coloured(pieces: Iterable[str], origins: Iterable[str]) -> Any:
    """A rich Text of token pieces, each in the colour of its origin."""
    from rich.text import Text

    text = Text()
    for piece, origin in zip(pieces, origins, strict=True):
        text.append(piece, style=ORIGIN_STYLES.get(origin, ""))
    return text


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}x"


def _choice_json(choice: Completion) -> dict[str, Any]:
    value: dict[str, Any] = {
        "index": choice.index,
        "text": choice.text,
        "token_ids": list(choice.token_ids),
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
    }
    if choice.logprobs is not None:
        value["logprobs"] = [_logprob_json(entry) for entry in choice.logprobs]
    return value


def _logprob_json(entry: TokenLogprob) -> dict[str, Any]:
    top = [{"token_id": token_id, "logprob": logprob} for token_id, logprob in entry.top]
    return {"token_id": entry.token_id, "logprob": entry.logprob, "rank": entry.rank, "top": top}
