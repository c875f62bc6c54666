"""The default rule: follow the draft for as long as it says what the target samples."""

from __future__ import annotations

import numpy as np

from paceline.interfaces import Noise
from paceline.types import Draft, Verdict


class CoupledVerifier:
    """Walks from the root: a child that holds the row's sampled token is accepted, else that token ends the path.

    rows [N+1] are the target's sampled tokens. Lossless for any drafter, chain or tree, as each emitted token is the
    one that the target samples, whatever was drafted.
    """

    lossless = True
    needs_laws = False
    chains_only = False

    def verify(self, draft: Draft, rows: np.ndarray, noise: Noise, *, position: int, attempt: int) -> Verdict:
        """The path of nodes that hold the sampled tokens, and the first sampled token that no child holds."""
        children: dict[tuple[int, int], int] = {}
        parents = draft.parents.tolist()
        for node, key in enumerate(zip(parents, draft.token_ids.tolist(), strict=True)):
            children.setdefault(key, node)
        sampled = rows.tolist()
        path: list[int] = []
        node = -1
        while (child := children.get((node, sampled[node + 1]))) is not None:
            path.append(child)
            node = child
        return Verdict(
            path=tuple(path), final_token=sampled[node + 1], kind="recovered" if node in parents else "bonus"
        )
