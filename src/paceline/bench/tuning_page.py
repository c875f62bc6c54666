"""What `paceline tune` found, as a picture and as a page that needs nothing else."""

from __future__ import annotations

import html
import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>paceline tune: {title}</title>
<style>
:root {{ color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif; }}
body {{ max-width: 52rem; margin: 2rem auto; padding: 0 1rem; }}
table {{ border-collapse: collapse; margin: 1rem 0; }}
th, td {{ padding: .2rem .8rem; text-align: right; border-bottom: 1px solid #8884; }}
th:first-child, td:first-child {{ text-align: left; }}
svg {{ max-width: 100%; height: auto; background: white; }}
</style>
<h1>Does speculation pay here?</h1>
<p>{verdict}</p>
<p>{conditions}</p>
{plot}
<h2>Settings</h2>
{settings}
<h2>Categories, with auto</h2>
{categories}
<h2>Accepted by position, with auto</h2>
{positions}
</html>
"""


def page(report: dict[str, Any]) -> str:
    """HTML of a report of `paceline tune`."""
    trials, auto = report["trials"], report["trials"][0]
    settings = [
        (
            trial["name"],
            f"{trial['plain_tokens_per_second']:.1f}",
            f"{trial['speculative_tokens_per_second']:.1f}",
            f"{trial['speedup']:.2f}x",
            f"{trial['predicted_speedup']:.2f}x",
            f"{trial['acceptance_length']:.2f}",
        )
        for trial in trials
    ]
    categories = [
        (name, f"{own['speedup']:.2f}x", f"{own['acceptance_length']:.2f}") for name, own in auto["by_category"].items()
    ]
    positions = [(index + 1, f"{share:.0%}") for index, share in enumerate(auto["accepted_per_position"])]
    environment = report["environment"]
    return _PAGE.format(
        title=html.escape(report["model"]),
        verdict=html.escape(report["verdict"]),
        conditions=html.escape(
            f"{report['model']}; {report['settings']['prompts']} prompts of {report['settings']['max_tokens']} new "
            f"tokens; {environment['cpu']}, {environment['cores']} cores."
        ),
        plot=_svg(report),
        settings=_table(
            ("", "plain tokens/s", "speculative tokens/s", "speed-up", "predicted", "tokens a pass"), settings
        ),
        categories=_table(("", "speed-up", "tokens a pass"), categories),
        positions=_table(("position", "of all drafts"), positions),
    )


def draw(report: dict[str, Any], path: Path) -> None:
    """The speed-ups over draft length and over requests at once, as a picture."""
    _figure(report).savefig(path)


def _svg(report: dict[str, Any]) -> str:
    text = io.StringIO()
    _figure(report).savefig(text, format="svg")
    return text.getvalue()[text.getvalue().index("<svg") :]  # without the XML head


def _figure(report: dict[str, Any]) -> Figure:
    from matplotlib.figure import Figure

    trials = report["trials"]
    fixed = [trial for trial in trials if trial["length"] is not None]
    auto = sorted((t for t in trials if t["length"] is None), key=lambda trial: trial["concurrency"])
    figure = Figure(figsize=(9, 3.5), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    left.plot([t["length"] for t in fixed], [t["speedup"] for t in fixed], marker="o", label="fixed length")
    left.plot(
        [t["length"] for t in fixed], [t["predicted_speedup"] for t in fixed], linestyle=":", label="predicted by cost"
    )
    left.axhline(auto[0]["speedup"], color="tab:green", label="auto")
    left.set_xlabel("nodes of a draft")
    left.set_ylabel("speed-up")
    right.plot(
        [t["concurrency"] for t in auto], [t["speedup"] for t in auto], color="tab:green", marker="o", label="auto"
    )
    right.set_xlabel("requests at once")
    for axes in (left, right):
        axes.axhline(1.0, color="grey", linestyle="--", linewidth=1)
        axes.legend()
    return figure


def _table(headings: tuple[str, ...], rows: list[tuple[Any, ...]]) -> str:
    head = "".join(f"<th>{html.escape(heading)}</th>" for heading in headings)
    lines = ("".join(f"<td>{html.escape(str(cell))}</td>" for cell in row) for row in rows)
    return f"<table><tr>{head}</tr>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"
