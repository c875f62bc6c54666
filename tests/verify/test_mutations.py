"""The exactness suite has teeth: each known way to be subtly wrong is detected by it."""

import numpy as np
import pytest
from exactness_oracle import (
    PARAMS,
    ToyModel,
    deterministic_chain,
    p_value,
    sampled_chain,
    simulate,
    speculative_law,
    total_variation,
)

from paceline.sampling.noise import DRAFT
from paceline.types import Draft, DraftLaw
from paceline.verify import chain, create
from paceline.verify.block import BlockVerifier
from paceline.verify.rejection import RejectionVerifier

RULES = [RejectionVerifier, BlockVerifier]
SEEDS = np.arange(200_000, dtype=np.uint64)
DETECTED = 1e-9  # p-values of healthy code are above 1e-4 in these tests, at fixed seeds


def models(params="plain", vocab_size=3):
    return ToyModel(vocab_size, PARAMS[params], seed=1), ToyModel(vocab_size, PARAMS[params], seed=2)


@pytest.mark.parametrize("rule", RULES)
def test_residual_dropped(rule):
    class Mutant(rule):
        def final_law(self, draft, laws, num_accepted):
            return laws[num_accepted]

    target, drafting = models()
    law = speculative_law(Mutant(), target, sampled_chain(drafting, 2), 3)
    assert total_variation(law, target.plain_law(3)) > 0.01


@pytest.mark.parametrize("rule", RULES)
def test_one_coin_for_all_positions(rule):
    class Mutant(rule):
        def coins(self, noise, *, position, attempt, count):
            return np.array(
                [noise.uniform(position=position, purpose=chain.COIN, attempt=attempt) for _ in range(count)]
            )

    target, drafting = models()
    law = speculative_law(Mutant(), target, sampled_chain(drafting, 2), 3)
    assert total_variation(law, target.plain_law(3)) > 0.005


@pytest.mark.parametrize("rule", RULES)
def test_anticipating_stop(rule):
    """Dropping a sampled token because its own q is low biases the text; stopping after it does not."""
    target, drafting = models()
    whole = sampled_chain(drafting, 2)

    def stopped(keep_the_token):
        def propose(output):
            drafts = []
            for weight, draft in whole(output):
                q = [draft.law.probs[i, t] for i, t in enumerate(draft.token_ids)]
                low = next((i for i, value in enumerate(q) if value < 0.3), len(q))
                end = min(len(q), low + 1 if keep_the_token else low)
                law = DraftLaw(draft.law.probs[:end])
                drafts.append((weight, Draft.chain(draft.token_ids[:end], source="toy", law=law)))
            return drafts

        return propose

    plain = target.plain_law(3)
    assert total_variation(speculative_law(rule(), target, stopped(keep_the_token=False), 3), plain) > 0.01
    assert total_variation(speculative_law(rule(), target, stopped(keep_the_token=True), 3), plain) < 1e-12


@pytest.mark.parametrize("name", ["rejection", "block", "coupled"])
def test_penalties_from_the_start_of_the_block(name):
    class Mutant(ToyModel):
        def adjust(self, state, draft, num_output):
            root = state.rows(None, num_output=num_output)
            return root * (1 + (len(draft) if draft else 0))

    target = Mutant(3, PARAMS["penalties"], seed=1)
    law = speculative_law(create(name, epsilon=0.3, alpha=0.09), target, deterministic_chain(2, 3), 3)
    assert total_variation(law, target.plain_law(3)) > 0.01


@pytest.mark.parametrize("rule", RULES)
def test_residual_drawn_with_the_words_of_the_draft(rule, monkeypatch):
    monkeypatch.setattr(chain, "RESIDUAL", DRAFT)
    target, drafting = models()
    texts = simulate(rule(), target, drafting, seeds=SEEDS, num_draft=2, length=3)
    assert p_value(texts, target.plain_law(3)) < DETECTED


@pytest.mark.parametrize("fresh", [True, False])
def test_words_reused_across_steps_of_block(fresh):
    """Its accepted length depends on later tokens, so a position that is drawn again needs new words."""
    target, drafting = models()
    texts = simulate(BlockVerifier(), target, drafting, seeds=SEEDS, num_draft=3, length=3, fresh=fresh)
    assert (p_value(texts, target.plain_law(3)) > 1e-4) == fresh
