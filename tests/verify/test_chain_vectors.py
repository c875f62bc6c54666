"""Worked cases of the two chain rules, computed independently of this code (chain_verification.json)."""

import json
from pathlib import Path

import numpy as np
import pytest
from exactness_oracle import chain_step

from paceline.types import Draft, DraftLaw
from paceline.verify import create

CASES = json.loads((Path(__file__).parent / "chain_verification.json").read_text())["cases"]


@pytest.mark.parametrize(("name", "key"), [("rejection", "token"), ("block", "block")])
@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_worked_case(case, name, key):
    verifier = create(name, epsilon=0.3, alpha=0.09)
    laws = np.array(case["target_probs"])
    draft = Draft.chain(case["draft_tokens"], source="vector", law=DraftLaw(np.array(case["draft_probs"])))
    joint = np.zeros((len(draft) + 1, case["vocab"]))  # accepted nodes, final token
    for probability, accepted, token in chain_step(verifier, draft, laws, position=5):
        joint[accepted, token] += probability
    np.testing.assert_allclose(joint.sum(axis=1), case[key]["prob_num_accepted"], atol=1e-12)
    for accepted, expected in enumerate(case[key]["final_token_probs"]):
        if expected is not None:
            np.testing.assert_allclose(verifier.final_law(draft, laws, accepted), expected, atol=1e-12)
