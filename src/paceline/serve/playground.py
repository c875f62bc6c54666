"""GET /: the playground, a page that shows speculation at work. It uses the public API, and nothing from elsewhere."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib.resources import files

from fastapi import APIRouter
from fastapi.responses import HTMLResponse

router = APIRouter()


@router.get("/", include_in_schema=False)
async def playground() -> HTMLResponse:
    """The page, which a browser lets run its own script alone, and talk to this server alone."""
    return HTMLResponse(_PAGE, headers=_HEADERS)


def _policy(page: str) -> str:
    """The page's Content-Security-Policy: its script and its style by their hashes, and hardly anything else."""
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src {_hash(page, 'script')}",
            f"style-src {_hash(page, 'style')}",
            "connect-src 'self'",
            "img-src data:",  # its icon
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        )
    )


def _hash(page: str, tag: str) -> str:
    [content] = re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


_PAGE = files("paceline.serve").joinpath("playground.html").read_text(encoding="utf-8")
_HEADERS = {
    "Content-Security-Policy": _policy(_PAGE),
    "Cache-Control": "no-cache",  # another version may be served there tomorrow
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
