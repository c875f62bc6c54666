"""Reports as one HTML page that needs nothing else."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import Any

_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif; }}
body {{ max-width: 52rem; margin: 2rem auto; padding: 0 1rem; }}
table {{ border-collapse: collapse; margin: 1rem 0; }}
th, td {{ padding: .2rem .8rem; text-align: right; border-bottom: 1px solid #8884; }}
th:first-child, td:first-child, .text td, .text th {{ text-align: left; vertical-align: top; }}
svg {{ max-width: 100%; height: auto; background: white; }}
</style>
<h1>{heading}</h1>
{body}
</html>
"""


def page(body: Iterable[str], *, title: str, heading: str) -> str:
    """HTML of a page; body: its parts, which are HTML already."""
    return _PAGE.format(title=html.escape(title), heading=html.escape(heading), body="\n".join(body))


def heading(text: str) -> str:
    return f"<h2>{html.escape(text)}</h2>"


def paragraph(text: str) -> str:
    return f"<p>{html.escape(text)}</p>"


def table(headings: Sequence[str], rows: Iterable[Sequence[Any]], *, kind: str = "figures") -> str:
    """kind: figures are set right, text left."""
    head = "".join(f"<th>{html.escape(heading)}</th>" for heading in headings)
    lines = ("".join(f"<td>{html.escape(str(cell))}</td>" for cell in row) for row in rows)
    return f'<table class="{kind}"><tr>{head}</tr>{"".join(f"<tr>{line}</tr>" for line in lines)}</table>'
