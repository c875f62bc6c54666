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
        sampled, parents = rows.tolist(), draft.parents.tolist()
        path: list[int] = []
        node, token = -1, sampled[0]
        for child, (parent, drafted) in enumerate(zip(parents, draft.token_ids.tolist(), strict=True)):
            if parent == node and drafted == token:  # children come after their parent: one look at each node will do
                path.append(child)
                node, token = child, sampled[child + 1]
        return Verdict(path=tuple(path), final_token=token, kind="recovered" if node in parents else "bonus")
