"""Finding a tag in text that arrives in pieces."""

from __future__ import annotations


def split_at(buffer: str, tag: str) -> tuple[str, str, bool]:
    """What is certain to stand before the tag, what follows it, and whether it was found.

    Where it was not, the second part is a tail that may yet become the tag.
    """
    before, found, after = buffer.partition(tag)
    if found:
        return before, after, True
    for length in range(min(len(tag) - 1, len(buffer)), 0, -1):
        if tag.startswith(buffer[-length:]):
            return buffer[:-length], buffer[-length:], False
    return buffer, "", False
