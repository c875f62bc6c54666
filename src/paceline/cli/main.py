"""The `paceline` command: one file a subcommand, all of them guarded."""

from __future__ import annotations

from typing import Annotated

import typer

import paceline
from paceline.cli.bench import bench
from paceline.cli.chat import chat
from paceline.cli.demo import demo
from paceline.cli.generate import generate
from paceline.cli.guard import guarded
from paceline.cli.models import models
from paceline.cli.profile import profile
from paceline.cli.serve import serve
from paceline.cli.trace import trace
from paceline.cli.tune import tune
from paceline.cli.tune_layers import tune_layers
from paceline.cli.verify import verify

app = typer.Typer(
    name="paceline",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"paceline {paceline.__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """Speculative decoding: the target model's own text, in fewer serial steps."""


for command in (generate, chat, serve, demo, verify, bench, profile, trace, tune, tune_layers, models):
    app.command()(guarded(command))
