"""Random JSON schemas that can be answered shortly: nested objects, arrays, unions, enums, bounded numbers, texts."""

from __future__ import annotations

import random
from typing import Any

_NAMES = ["name", "age", "city_of_birth", "tags", "price", "isActive", "x", "größe", "due date", "id"]
_WORDS = ["red", "green", "very large", "néant", 'a "b"', "0", "\\", "yes/no"]


def schemas(count: int) -> list[dict[str, Any]]:
    """The first `count` of a fixed sequence."""
    return [_schema(random.Random(seed), depth=0) for seed in range(count)]


def _schema(rng: random.Random, *, depth: int) -> dict[str, Any]:
    if depth == 0:
        return _object(rng, depth)
    kinds = [_integer, _number, _text, _text, _enum, _constant]
    if depth < 3:
        kinds += [_object, _array, _union]
    return rng.choice(kinds)(rng, depth)


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(_NAMES, rng.randint(1, 3))
    return {
        "type": "object",
        "properties": {name: _schema(rng, depth=depth + 1) for name in names},
        "required": [name for name in names if rng.random() < 0.8],
        "additionalProperties": False,
    }


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    least = rng.randint(0, 2)
    most = least + rng.randint(0, 1)
    return {"type": "array", "items": _schema(rng, depth=depth + 1), "minItems": least, "maxItems": max(1, most)}


def _union(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_schema(rng, depth=depth + 1) for _ in range(2)]}


def _integer(rng: random.Random, depth: int) -> dict[str, Any]:
    least = rng.randint(-200, 200)
    return {"type": "integer", "minimum": least, "maximum": least + rng.choice([0, 3, 50, 5000])}


def _number(rng: random.Random, depth: int) -> dict[str, Any]:
    least = round(rng.uniform(-20, 20), 1)
    return {"type": "number", rng.choice(["minimum", "exclusiveMinimum"]): least, "maximum": least + 10}


def _text(rng: random.Random, depth: int) -> dict[str, Any]:
    if rng.random() < 0.3:
        return {
            "type": "string",
            "pattern": rng.choice(["^[A-Z]{2}-[0-9]{3}$", "^(ab|cd)+$", "^[^@ ]{1,9}@[a-z]{2,5}$"]),
        }
    least = rng.randint(0, 4)
    return {"type": "string", "minLength": least, "maxLength": least + rng.randint(0, 12)}


def _enum(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"enum": [*rng.sample(_WORDS, rng.randint(1, 3)), *rng.sample([1, None, True, -2.5], rng.randint(0, 2))]}


def _constant(rng: random.Random, depth: int) -> dict[str, Any]:
    return rng.choice([{"type": "boolean"}, {"type": "null"}, {"const": rng.choice(_WORDS)}])
