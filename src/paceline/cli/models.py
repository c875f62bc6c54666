"""`paceline models`: what can be had by a short name, and what is here."""

from __future__ import annotations

from typing import Annotated

import typer

from paceline.cli import options
from paceline.cli.output import note, print_json
from paceline.errors import ConfigError


def models(
    remove: Annotated[str | None, typer.Option(help="Delete this model from the cache.", metavar="NAME")] = None,
    as_json: options.AsJSON = False,
) -> int:
    """List the models that have a short name, and which of them are on this machine."""
    if remove is not None and as_json:
        raise ConfigError("--json shows the list and would be ignored by --remove: drop one of the two.")

    from paceline.models import catalog

    if remove is not None:
        freed_bytes = catalog.remove(remove)
        note(f"{remove} removed, {_megabytes(freed_bytes)} freed" if freed_bytes else f"{remove} was not here")
        return 0
    listings = catalog.list_models()
    if as_json:
        print_json(
            [
                {
                    "name": listing.name,
                    "present": listing.present,
                    "path": str(listing.path),
                    "size_bytes": listing.size_bytes,
                    "licence": listing.licence,
                    "source": listing.source,
                }
                for listing in listings
            ]
        )
        return 0

    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for heading in ("name", "here", "size", "licence", "source"):
        table.add_column(heading, justify="right" if heading == "size" else "left")
    for listing in listings:
        here = "[green]yes[/]" if listing.present else "no"
        table.add_row(listing.name, here, _megabytes(listing.size_bytes), listing.licence, listing.source)
    Console().print(table)
    note("A model folder (safetensors), a GGUF file or a hub id works wherever a name does.")
    return 0


def _megabytes(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:,.0f} MB"
