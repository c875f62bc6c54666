"""The curve of `paceline profile` as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.errors import ConfigError, MissingDependencyError

_SUFFIXES = (".svg", ".png")


def require(path: str, *, option: str = "--plot") -> None:
    """Raises ConfigError for another kind of picture, MissingDependencyError without matplotlib."""
    if Path(path).suffix.lower() not in _SUFFIXES:
        raise ConfigError(f"{option} must be an .svg or .png file; got {path!r:.100}: rename it.")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError(f"{option} needs matplotlib: pip install 'paceline[bench]'.") from error


def draw(report: dict[str, Any], path: str) -> None:
    """Median milliseconds by tokens of a pass, the middle half of the repeats as a band, the floor as a line."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullFormatter

    target = report["target"]
    tokens = [cost["tokens"] for cost in target]
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.fill_between(tokens, [c["low_ms"] for c in target], [c["high_ms"] for c in target], alpha=0.2, linewidth=0)
    axes.plot(tokens, [c["ms"] for c in target], marker="o", label="target pass, median")
    if report["floor_ms"] is not None:
        label = f"weights read at {report['bandwidth_gb_s']:.0f} GB/s"
        axes.axhline(report["floor_ms"], linestyle="--", color="grey", label=label)
    axes.set_xscale("log", base=2)
    axes.set_xticks(tokens, list(map(str, tokens)))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens of the pass")
    axes.set_ylabel("ms")
    axes.set_title(report["model"].split(";")[0], fontsize="medium")
    axes.legend()
    figure.savefig(path)
