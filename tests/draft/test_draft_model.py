"""DraftModelDrafter against the model's own plain continuation. ToyModel notices every mistake in its cache."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.draft.draft_model import DraftModelDrafter
from paceline.draft.shared_vocabulary import SharedVocabulary
from paceline.params import SamplingParams
from paceline.sampling.noise import DRAFT, PhiloxNoise
from paceline.sampling.race import race
from paceline.testing import ToyModel
from paceline.types import Draft, ForwardBatch, RequestView

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def view(token_ids, *, request_id="r", prompt_length=4, attempt=0, seed=11, stream=0, **params) -> RequestView:
    ids = np.array(token_ids, dtype=np.int32)
    ids.flags.writeable = False
    return RequestView(request_id, ids, prompt_length, SamplingParams(**params), seed, stream, attempt)


def toy(**options) -> ToyModel:
    return ToyModel(**{"num_blocks": 16, "block_size": 4, "vocab_size": 12, **options})


def drafter(model: ToyModel | None = None, **options) -> DraftModelDrafter:
    return DraftModelDrafter(model or toy(), **{"rule_needs_law": False, "least_reach": 0.0, **options})


def propose(subject: DraftModelDrafter, *views: RequestView, budget: int = 4) -> list[list[int] | None]:
    drafts = subject.propose(views, [budget] * len(views))
    subject.cache.check_integrity()
    return [None if draft is None else draft.token_ids.tolist() for draft in drafts]


def last_logits(token_ids) -> np.ndarray:
    """Logits [V] after token_ids, from a model that knows nothing else."""
    count = len(token_ids)
    table = np.arange(-(-count // 4), dtype=np.int32)
    batch = ForwardBatch(
        token_ids=np.array(token_ids, dtype=np.int32),
        positions=np.arange(count, dtype=np.int32),
        slots=np.arange(count, dtype=np.int64),
        query_starts=np.array([0, count], dtype=np.int32),
        context_lengths=np.array([0], dtype=np.int32),
        block_tables=[table],
        ancestors=[None],
        logit_rows=np.array([count - 1], dtype=np.int32),
    )
    logits = toy(num_blocks=64).forward(batch).logits
    assert logits is not None
    return logits[0].astype(np.float64)


def law(token_ids, temperature: float) -> np.ndarray:
    weights = np.exp((last_logits(token_ids) - last_logits(token_ids).max()) / temperature)
    return weights / weights.sum()


def continuation(token_ids, count: int) -> list[int]:
    """The model's own greedy text."""
    text = list(token_ids)
    for _ in range(count):
        text.append(int(last_logits(text).argmax()))
    return text[len(token_ids) :]


def test_greedy_drafts_are_the_models_own_text():
    assert propose(drafter(), view(PROMPT)) == [continuation(PROMPT, 4)]


def test_shared_noise_draws_what_the_target_would_draw():
    noise = PhiloxNoise(11, 3)
    text = list(PROMPT)
    for position in range(len(PROMPT), len(PROMPT) + 4):
        uniforms = noise.uniforms(position=position, purpose=0, attempt=0, vocab_size=12)
        text.append(int(race(law(text, 0.9), uniforms)))
    assert propose(drafter(), view(PROMPT, temperature=0.9, stream=3, attempt=5)) == [text[len(PROMPT) :]]


def test_laws_are_what_the_tokens_were_drawn_from_with_words_of_their_own():
    subject = drafter(rule_needs_law=True)
    (draft,) = subject.propose([view(PROMPT, temperature=0.9, attempt=2)], [3])
    assert draft is not None
    assert draft.law is not None
    assert draft.confidence is not None
    assert draft.law.ids is None
    text = list(PROMPT)
    for node, token in enumerate(draft.token_ids.tolist()):
        uniforms = PhiloxNoise(11).uniforms(position=len(text), purpose=DRAFT, attempt=2, vocab_size=12)
        expected = law(text, 0.9)
        np.testing.assert_allclose(draft.law.probs[node], expected, rtol=1e-6)
        assert token == int(race(expected, uniforms))
        assert draft.confidence[node] == draft.law.probs[node, token]
        text.append(token)


def test_request_drafts_the_same_alone_and_in_company_and_in_chunks():
    views = [view(PROMPT * k, request_id=str(k), temperature=0.7, top_k=5) for k in (1, 2, 3)]
    alone = [propose(drafter(), v)[0] for v in views]
    assert propose(drafter(), *views) == alone
    assert propose(drafter(max_num_batched_tokens=3), *views) == alone


def test_budgets_differ_between_requests():
    drafts = drafter().propose([view(PROMPT, request_id="a"), view(PROMPT, request_id="b")], [1, 5])
    assert [None if d is None else len(d) for d in drafts] == [1, 5]


def test_only_what_is_new_is_computed():
    model = toy()
    subject = drafter(model)
    (first,) = propose(subject, view(PROMPT))
    assert first is not None
    assert (model.num_passes, model.num_tokens) == (4, len(PROMPT) + 3)
    accepted = PROMPT + first + continuation(PROMPT + first, 1)  # full acceptance: two tokens to catch up with
    assert propose(subject, view(accepted)) == [continuation(accepted, 4)]
    assert (model.num_passes, model.num_tokens) == (8, len(PROMPT) + 3 + 2 + 3)


def test_rejected_tokens_are_rolled_back():
    model = toy()
    subject = drafter(model)
    (first,) = propose(subject, view(PROMPT))
    assert first is not None
    recovered = [*PROMPT, first[0], (first[1] + 1) % 12]
    before = model.num_tokens
    assert propose(subject, view(recovered)) == [continuation(recovered, 4)]
    assert model.num_tokens - before == 1 + 3


def test_prefix_caching_shares_the_prompt():
    model = toy()
    subject = drafter(model, prefix_caching=True)
    propose(subject, view(PROMPT, request_id="a"))
    before = model.num_tokens
    assert propose(subject, view([*PROMPT, 7], request_id="b")) == [continuation([*PROMPT, 7], 4)]
    assert model.num_tokens - before == 1 + 3


def test_drafts_end_at_the_models_context():
    assert propose(drafter(toy(max_model_len=10)), view(PROMPT)) == [continuation(PROMPT, 3)]
    assert propose(drafter(toy(max_model_len=8)), view(PROMPT)) == [continuation(PROMPT, 1)]
    subject = drafter(toy(max_model_len=7))
    assert propose(subject, view(PROMPT)) == [None]
    assert subject.cache.num_free_blocks == 16


def test_request_without_room_gets_no_draft_and_holds_nothing():
    subject = drafter(toy(num_blocks=3))
    drafts = propose(subject, view(PROMPT, request_id="a"), view(PROMPT, request_id="b"))
    assert drafts == [continuation(PROMPT, 4), None]
    subject.release("a")
    assert subject.cache.num_free_blocks == 3
    drafts = propose(drafter(toy(num_blocks=5)), view(PROMPT, request_id="a"), view(PROMPT, request_id="b"))
    assert drafts == [continuation(PROMPT, 4), continuation(PROMPT, 1)]


def padded(target_size: int) -> SharedVocabulary:
    return SharedVocabulary(target_size=target_size, own_size=12)


def test_unknown_tokens_cannot_be_drafted_after():
    assert propose(drafter(vocabulary=padded(14)), view([*PROMPT, 13])) == [None]


@pytest.mark.parametrize("target_size", [6, 14])
def test_vocabularies_padded_to_other_sizes_draft_common_tokens_only(target_size):
    subject = drafter(rule_needs_law=True, vocabulary=padded(target_size))
    (draft,) = subject.propose([view([1, 2, 3], temperature=2.0)], [8])
    assert draft is not None
    assert draft.law is not None
    assert draft.token_ids.max() < target_size
    assert draft.law.probs.shape == (8, target_size)
    assert draft.law.ids is None
    np.testing.assert_allclose(draft.law.probs[:, :12].sum(axis=1), 1)


def test_request_that_names_tokens_beyond_the_draft_vocabulary_is_drafted_for():
    subject = drafter(vocabulary=padded(14))
    assert propose(subject, view(PROMPT, logit_bias={13: 1.0, 3: 50.0})) == [[3, 3, 3, 3]]


def test_nothing_is_drafted_where_only_unknown_tokens_are_allowed():
    subject = drafter(vocabulary=padded(14))
    for temperature in (0.0, 0.8):
        assert propose(subject, view(PROMPT, allowed_token_ids=[12, 13], temperature=temperature)) == [None]
    params = {"allowed_token_ids": [1, 13], "min_tokens": 6, "max_tokens": 9}
    assert propose(drafter(vocabulary=padded(14), eos_ids=frozenset({1})), view(PROMPT, **params)) == [None]


def test_penalties_see_the_drafted_tokens():
    """No token twice: a strong presence penalty must act on tokens drafted in this call and on known output."""
    params = {"presence_penalty": 2.0, "frequency_penalty": 2.0, "logit_bias": {5: 30.0}, "allowed_token_ids": range(9)}
    small = toy(peakedness=0.1)
    known = [3, 1, 4, 1]
    drafted = []
    subject = drafter(small)
    for _ in range(2):
        (draft,) = propose(subject, view([*known, *drafted], **params))
        assert draft is not None
        drafted += draft
    assert drafted[0] == 5
    assert sorted(t for t in drafted if t != 5) == sorted({t for t in drafted if t != 5})
    assert max(drafted) < 9


def test_min_tokens_bans_the_end():
    bias = {"logit_bias": {1: 50.0}, "max_tokens": 9}
    eos = frozenset({1})
    assert propose(drafter(eos_ids=eos), view(PROMPT, **bias)) == [[1, 1, 1, 1]]
    (draft,) = propose(drafter(eos_ids=eos), view(PROMPT, min_tokens=6, **bias))
    assert draft is not None
    assert [token == 1 for token in draft] == [False, False, True, True]


def test_interrupted_call_is_taken_up_again():
    class Interrupted(ToyModel):
        passes_left = 2

        def forward(self, batch, sampling=None):
            self.passes_left -= 1
            if self.passes_left == 0:
                raise KeyboardInterrupt
            return super().forward(batch, sampling)

    subject = drafter(Interrupted(num_blocks=16, block_size=4, vocab_size=12))
    with pytest.raises(KeyboardInterrupt):
        subject.propose([view(PROMPT)], [4])
    subject.cache.check_integrity()
    assert propose(subject, view(PROMPT)) == [continuation(PROMPT, 4)]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.data(), st.integers(3, 12), st.booleans(), st.booleans())
def test_any_history_gives_the_drafts_of_a_fresh_drafter(data, num_blocks, prefix_caching, rule_needs_law):
    """Requests grow by accepted, recovered and unrelated tokens, come and go; the K/V budget is tiny."""
    options = {"rule_needs_law": rule_needs_law}
    subject = drafter(toy(num_blocks=num_blocks), prefix_caching=prefix_caching, max_num_batched_tokens=7, **options)
    texts = {"a": PROMPT[:5], "b": PROMPT[:3], "c": PROMPT}
    drafts: dict[str, Draft | None] = {}
    for step in range(data.draw(st.integers(1, 8))):
        names = data.draw(st.lists(st.sampled_from("abc"), min_size=1, max_size=3, unique=True))
        views = [view(texts[n], request_id=n, temperature=0.8, attempt=step, seed=ord(n)) for n in names]
        budgets = [data.draw(st.integers(1, 5)) for _ in names]
        for name, own, budget, draft in zip(names, views, budgets, subject.propose(views, budgets), strict=True):
            drafts[name] = draft
            if draft is not None:
                (expected,) = drafter(toy(num_blocks=64), **options).propose([own], [budget])
                assert expected is not None
                assert draft.token_ids.tolist() == expected.token_ids[: len(draft)].tolist()
        subject.cache.check_integrity()
        for name in names:
            draft = drafts[name]
            kept = data.draw(st.integers(0, len(draft))) if draft is not None else 0
            accepted = draft.token_ids[:kept].tolist() if draft is not None else []
            texts[name] = [*texts[name], *accepted, data.draw(st.integers(0, 11))]
        if data.draw(st.booleans()):
            name = data.draw(st.sampled_from("abc"))
            subject.release(name)
            texts[name] = PROMPT[: data.draw(st.integers(1, 8))]
    for name in texts:
        subject.release(name)
    subject.cache.check_integrity()
    assert subject.cache.num_free_blocks == num_blocks


def test_guesses_that_another_request_shares_are_copied_before_they_are_written_over():
    """Blocks of guesses can be found by prefix. Whoever turns out to be wrong about them must not write into them."""
    subject = drafter(prefix_caching=True)
    (guesses,) = propose(subject, view(PROMPT, request_id="first"), budget=6)
    known = [*PROMPT, *guesses[:5], 7]  # the block of the first four guesses is full, and known
    assert propose(subject, view(known, request_id="second")) == [continuation(known, 4)]
    assert subject.cache.block_table("second")[2] == subject.cache.block_table("first")[2]
    corrected = [*PROMPT, guesses[0], (guesses[1] + 1) % 12]
    assert propose(subject, view(corrected, request_id="first")) == [continuation(corrected, 4)]
    assert propose(subject, view([*known, 8], request_id="second")) == [continuation([*known, 8], 4)]
