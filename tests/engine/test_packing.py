"""Trees in a pass: ancestor masks, positions and rows."""

from __future__ import annotations

import numpy as np

from paceline.engine.packing import ancestor_mask, pack
from paceline.params import SamplingParams
from paceline.types import Draft
from toy_engine import PROMPT, make_engine

TREE = Draft(
    token_ids=np.array([5, 6, 7, 8], dtype=np.int32),
    parents=np.array([-1, -1, 1, 0], dtype=np.int32),
)


def test_ancestors_of_pending_tokens_and_nodes() -> None:
    expected = [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],  # the root
        [1, 1, 1, 0, 0, 0],
        [1, 1, 0, 1, 0, 0],
        [1, 1, 0, 1, 1, 0],
        [1, 1, 1, 0, 0, 1],
    ]
    assert ancestor_mask(TREE, num_before=2).astype(int).tolist() == expected


def test_a_chain_and_a_tree_in_one_pass() -> None:
    engine = make_engine(lambda view: None, max_num_batched_tokens=64)
    for _ in range(2):
        engine.add_request(PROMPT, SamplingParams(seed=3, temperature=1.0, max_tokens=20, ignore_eos=True))
    engine.step()
    plan, _ = engine.scheduler.schedule()
    chain = Draft.chain([2, 3], source="chain")
    batch, sampling, rows = pack(plan, [chain, TREE], engine.cache, want_laws=False)
    known = len(PROMPT) + 1
    assert batch.query_starts.tolist() == [0, 3, 8]
    assert batch.context_lengths.tolist() == [known - 1] * 2
    at = known - 1
    assert batch.positions.tolist() == [at, at + 1, at + 2, at, at + 1, at + 1, at + 2, at + 2]
    assert batch.logit_rows.tolist() == list(range(8))
    assert batch.ancestors[0] is None
    assert batch.ancestors[1] is not None
    expected_slots = [engine.cache.slots(part.sequence.id, at, n) for part, n in zip(plan, (3, 5), strict=True)]
    assert batch.slots.tolist() == np.concatenate(expected_slots).tolist()
    assert sampling is not None
    assert sampling.position.tolist() == (batch.positions + 1).tolist()
    assert [(r.sample.start, r.sample.stop) for r in rows] == [(0, 3), (3, 8)]
    assert all(r.prompt.start == r.prompt.stop for r in rows)
