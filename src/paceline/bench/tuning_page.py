"""What `paceline tune` found, as a picture and as a page that needs nothing else."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.bench.page import heading, page, paragraph, table

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def render(report: dict[str, Any]) -> str:
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
    return page(
        [
            paragraph(report["verdict"]),
            paragraph(
                f"{report['model']}; {report['settings']['prompts']} prompts of {report['settings']['max_tokens']} new "
                f"tokens; {environment['cpu']}, {environment['cores']} cores."
            ),
            _svg(report),
            heading("Settings"),
            table(("", "plain tokens/s", "speculative tokens/s", "speed-up", "predicted", "tokens a pass"), settings),
            heading("Categories, with auto"),
            table(("", "speed-up", "tokens a pass"), categories),
            heading("Accepted by position, with auto"),
            table(("position", "of all drafts"), positions),
        ],
        title=f"paceline tune: {report['model']}",
        heading="Does speculation pay here?",
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
