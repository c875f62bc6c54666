"""What a drafter may hand to the engine or to a hybrid; anything else is named before it can do harm."""

from __future__ import annotations

from operator import ge
from typing import TypeGuard

import numpy as np

from paceline.errors import DraftMismatchError
from paceline.types import Draft, DraftLaw

_ROUNDING = 1e-6  # of a probability


def check_list(drafts: object, *, drafter: str, count: int) -> None:
    """Raises DraftMismatchError, naming the drafter, unless it proposed as many drafts as it was asked for."""
    if not isinstance(drafts, list) or len(drafts) != count:
        raise DraftMismatchError(f"drafter {drafter!r} must return a list of {count} drafts or Nones.")


def check_draft(draft: Draft, *, drafter: str, budget: int, vocab_size: int, chains_only: bool) -> None:
    """Raises DraftMismatchError, naming the drafter, unless the draft is a tree within budget and vocabulary."""
    problem = _problem(draft, budget=budget, vocab_size=vocab_size, chains_only=chains_only)
    if problem:
        raise DraftMismatchError(f"drafter {drafter!r} {problem}")


def _problem(draft: Draft, *, budget: int, vocab_size: int, chains_only: bool) -> str | None:
    if not isinstance(draft, Draft):
        return f"proposed a {type(draft).__name__}: it must be a Draft; Draft.chain makes one."
    for name, values in (("token_ids", draft.token_ids), ("parents", draft.parents)):
        if not _is_array(values, "iu") or values.ndim != 1:
            return f"proposed {name} that are not a one-dimensional integer array: use np.array(..., dtype=np.int32)."
    # Every draft of every request passes here in every step, and holds a handful: quicker in Python than in NumPy.
    token_ids, parents = draft.token_ids.tolist(), draft.parents.tolist()
    if len(token_ids) > budget:
        return f"proposed {len(token_ids)} nodes where {budget} were allowed: cut the draft to its budget."
    if not token_ids:
        return None
    if len(parents) != len(token_ids):
        return f"proposed {len(token_ids)} nodes with {len(parents)} parents: give one for each node."
    if min(token_ids) < 0 or max(token_ids) >= vocab_size:
        return f"proposed a token outside the target's {vocab_size}: map or drop it."
    if min(parents) < -1 or any(map(ge, parents, range(len(parents)))):
        return "proposed a node before its parent: order parents first; -1 is the root."
    if chains_only and not draft.is_chain:
        return "proposed a tree; this verification rule takes chains: use coupled."
    if draft.confidence is not None and not _are_probabilities(draft.confidence, len(token_ids)):
        return f"gave a confidence that is not an array of {len(token_ids)} probabilities: give one for each node."
    if not isinstance(draft.source, str):
        return f"gave the source {draft.source!r:.60}: it must be the drafter's name."
    if draft.proposers is not None and not _are_names(draft.proposers, len(token_ids)):
        return f"gave proposers that are not {len(token_ids)} tuples of names: give a tuple of them for each node."
    return None if draft.law is None else _problem_of_law(draft.law, draft.token_ids, vocab_size)


def _is_array(values: object, kinds: str) -> TypeGuard[np.ndarray]:
    return isinstance(values, np.ndarray) and values.dtype.kind in kinds


def _are_probabilities(values: object, count: int) -> bool:
    if not _is_array(values, "f") or values.shape != (count,):
        return False
    return all(0 <= value <= 1 + _ROUNDING for value in values.tolist())


def _are_names(proposers: object, count: int) -> bool:
    if not isinstance(proposers, tuple) or len(proposers) != count:
        return False
    return all(isinstance(own, tuple) and all(isinstance(name, str) for name in own) for own in proposers)


def _problem_of_law(law: object, token_ids: np.ndarray, vocab_size: int) -> str | None:
    if (
        not isinstance(law, DraftLaw)
        or not _is_array(law.probs, "f")
        or not (law.ids is None or _is_array(law.ids, "iu"))
    ):
        return "gave a law that is no DraftLaw of arrays: probs are floats, ids integers or None."
    width = vocab_size if law.ids is None else len(law.ids)
    if law.probs.ndim != 2 or len(law.probs) != len(token_ids) or law.probs.shape[1] > width:
        return f"gave a law of shape {law.probs.shape} for {len(token_ids)} nodes: it must be [nodes, {width}]."
    columns = token_ids[:, None] == (np.arange(law.probs.shape[1]) if law.ids is None else law.ids)
    if not np.all(np.isfinite(law.probs)) or np.any(law.probs < 0) or not np.all((law.probs * columns).sum(axis=1) > 0):
        return "drafted a token that its own law excludes: sample the nodes from the law that is handed over."
    return None
