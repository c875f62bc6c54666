"""Prompt files: JSON lines with `id`, `category` and `turns`, and the choice of prompts from them.

Spec-Bench's and SPEED-Bench's files are such, but for `question_id` in the place of `id`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Prompt:
    """One line of a prompt file."""

    id: str
    category: str
    turns: tuple[str, ...]  # the user's messages; bench and verify send the first

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The first turn as chat messages."""
        return [{"role": "user", "content": self.turns[0]}]


def read_prompts(path: str) -> list[Prompt]:
    """All prompts of a file. Raises ConfigError, with the line's number, for a file or a line that cannot be read."""
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").split("\n")  # splitlines would cut at U+2028 too
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not a text file in UTF-8: prompt files are JSON lines.") from error
    except OSError as error:
        raise ConfigError(f"cannot read the prompt file {path}: {error.strerror}.") from error
    prompts = [_parse(line, f"{path} line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise ConfigError(f"{path} holds no prompts: give JSON lines with id, category and turns.")
    repeated = [name for name, count in Counter(prompt.id for prompt in prompts).items() if count > 1]
    if repeated:
        raise ConfigError(f"{path} has the id {repeated[0]!r} more than once: ids must be unique.")
    return prompts


def select(
    prompts: Sequence[Prompt],
    *,
    categories: Sequence[str] = (),
    per_category: int | None = None,
    limit: int | None = None,
) -> list[Prompt]:
    """Those of the named categories (none named = all), the first per_category of each, the first limit of all.

    Raises ConfigError for a category that no prompt has, and for a number below 1.
    """
    for name, value in (("--per-category", per_category), ("--limit", limit)):
        if value is not None and value < 1:
            raise ConfigError(f"{name} must be at least 1; got {value}: leave it out for all prompts.")
    known = list(dict.fromkeys(prompt.category for prompt in prompts))
    for category in categories:
        if category not in known:
            raise ConfigError(f"no prompt has the category {category!r}; the file has {', '.join(known)}.")
    seen: Counter[str] = Counter()
    chosen = []
    for prompt in prompts:
        seen[prompt.category] += 1
        wanted = not categories or prompt.category in categories
        if wanted and (per_category is None or seen[prompt.category] <= per_category):
            chosen.append(prompt)
    return chosen[:limit]


def _parse(line: str, where: str) -> Prompt:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:  # also a number of thousands of digits, thousands of brackets
        reason = getattr(error, "msg", error)
        raise ConfigError(f"{where} is not valid JSON ({reason}): one JSON object a line.") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{where} is not a JSON object: it needs id, category and turns.")
    if "id" not in value and "question_id" in value:
        value["id"] = value["question_id"]
    missing = [name for name in ("id", "category", "turns") if name not in value]
    if missing:
        raise ConfigError(f"{where} has no {missing[0]!r}: it needs id, category and turns.")
    names = [value["id"], value["category"]]
    if not all(isinstance(name, (str, int, float)) for name in names):
        raise ConfigError(f"{where} needs id and category as text or a number.")
    names = [str(name) for name in names]
    turns = value["turns"]
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn for turn in turns):
        raise ConfigError(f"{where} needs turns as a list of user messages, at least one, none empty.")
    try:
        "".join([*names, *turns]).encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{where} holds half a surrogate pair, which is no character: drop it.") from error
    return Prompt(id=names[0], category=names[1], turns=tuple(turns))
