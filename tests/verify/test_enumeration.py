"""Each lossless rule gives the target's law: exactly by enumeration, and in 2e5 samples with the real noise."""

import numpy as np
import pytest
from exactness_oracle import (
    PARAMS,
    ToyModel,
    chain_step,
    deterministic_chain,
    deterministic_tree,
    p_value,
    sampled_chain,
    simulate,
    speculative_law,
    total_variation,
)

from paceline.sampling.noise import DRAFT, PhiloxNoise, purpose_word
from paceline.sampling.sampler import sample_rows
from paceline.types import Draft, DraftLaw, RowSampling
from paceline.verify import create

SIZES = [(2, 3, 4), (3, 2, 4), (4, 2, 3)]  # vocabulary, draft, text


def rule(name):
    return create(name, epsilon=0.3, alpha=0.09)


def models(params, vocab_size, **kwargs):
    target = ToyModel(vocab_size, PARAMS[params], seed=1, **kwargs)
    return target, ToyModel(vocab_size, PARAMS[params], seed=2, **kwargs)


CASES = [
    *[(name, kind) for name in ("rejection", "block", "coupled") for kind in ("deterministic chain", "sampled chain")],
    ("coupled", "tree"),
]


@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_total_variation(name, kind, params):
    for vocab_size, num_draft, length in SIZES:
        if params == "bans" and vocab_size == 2:
            continue  # ban, bias and an ending need three tokens
        target, drafting = models(params, vocab_size)
        drafter = {
            "deterministic chain": deterministic_chain(num_draft, vocab_size),
            "sampled chain": sampled_chain(drafting, num_draft),
            "tree": deterministic_tree(vocab_size),
        }[kind]
        law = speculative_law(rule(name), target, drafter, length)
        assert sum(law.values()) == pytest.approx(1.0, abs=1e-12)
        assert total_variation(law, target.plain_law(length)) < 1e-12


@pytest.mark.parametrize("name", ["rejection", "block"])
def test_total_variation_of_long_drafts_and_of_a_reduced_draft_vocabulary(name):
    target, drafting = models("plain", 2)
    law = speculative_law(rule(name), target, sampled_chain(drafting, 4), 4)
    assert total_variation(law, target.plain_law(4)) < 1e-12
    target, drafting = models("plain", 4)
    law = speculative_law(rule(name), target, sampled_chain(drafting, 2, ids=(3, 1)), 3)
    assert total_variation(law, target.plain_law(3)) < 1e-12


@pytest.mark.parametrize("name", ["rejection", "block"])
def test_total_variation_when_draft_and_target_agree(name):
    """No residual mass anywhere."""
    target, _ = models("plain", 3)
    law = speculative_law(rule(name), target, sampled_chain(target, 2), 3)
    assert total_variation(law, target.plain_law(3)) < 1e-12


@pytest.mark.parametrize("kind", ["deterministic", "sampled"])
def test_block_accepts_at_least_as_much_as_rejection(kind):
    """In expectation; exactly as much when the draft is deterministic."""
    target, drafting = models("plain", 3)
    drafter = sampled_chain(drafting, 3) if kind == "sampled" else deterministic_chain(3, 3)

    def expected_accepted(name):
        return sum(
            weight * probability * accepted
            for weight, draft in drafter(())
            for probability, accepted, _ in chain_step(rule(name), draft, target.laws((), draft), 2)
        )

    gain = expected_accepted("block") - expected_accepted("rejection")
    assert gain > 1e-3 if kind == "sampled" else abs(gain) < 1e-12


@pytest.mark.parametrize("params", ["plain", "top_p", "penalties"])
@pytest.mark.parametrize("name", ["rejection", "block", "coupled"])
def test_chi_square_with_real_noise(name, params):
    target, drafting = models(params, 3)
    seeds = np.arange(200_000, dtype=np.uint64)
    texts = simulate(rule(name), target, drafting, seeds=seeds, num_draft=2, length=3)
    assert p_value(texts, target.plain_law(3)) > 1e-4
    if name == "coupled":
        plain = simulate(rule(name), target, drafting, seeds=seeds, num_draft=0, length=3)
        np.testing.assert_array_equal(texts, plain)


@pytest.mark.parametrize("name", ["rejection", "block", "coupled"])
def test_simulation_is_the_real_step(name):
    """The batched loop above gives what sampler and verify give one request at a time."""
    verifier = rule(name)
    target, drafting = models("penalties", 3)
    seeds = np.arange(60, dtype=np.uint64)
    texts = simulate(verifier, target, drafting, seeds=seeds, num_draft=2, length=4)
    for seed in seeds.tolist():
        output, attempt = (), 0
        while len(output) < 4:
            emitted = real_step(verifier, target, drafting, output, seed, attempt)
            output, attempt = (*output, *emitted), attempt + 1
        assert output[:4] == tuple(texts[seed])


def real_step(verifier, target, drafting, output, seed, attempt):
    def sample(model, draft, want_laws, purpose):
        logits, sampling = model.rows(output, draft)
        fields = {name: getattr(sampling, name) for name in RowSampling.__dataclass_fields__}
        fields |= {"seed": np.full(len(logits), seed, np.uint64), "purpose": np.full(len(logits), purpose, np.uint32)}
        return sample_rows(logits, RowSampling(**fields | {"want_laws": want_laws}))

    path, laws = [], []
    for _ in range(2):
        purpose = purpose_word(DRAFT, attempt) if verifier.needs_laws else 0
        drawn = sample(drafting, Draft.chain(path, source="toy"), True, purpose)
        path, laws = [*path, int(drawn.token_ids[-1])], [*laws, drawn.laws[-1]]
    draft = Draft.chain(path, source="toy", law=DraftLaw(np.array(laws)))
    result = sample(target, draft, verifier.needs_laws, 0)
    rows = result.laws if verifier.needs_laws else result.token_ids
    verdict = verifier.verify(
        draft, rows, PhiloxNoise(seed, 0), position=len(target.prompt) + len(output), attempt=attempt
    )
    return (*path[: len(verdict.path)], verdict.final_token)
