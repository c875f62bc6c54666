"""Drafting across vocabularies: the text stays the target's, and drafts agree as far as the two models do."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.draft.cross_vocabulary import CrossVocabulary
from paceline.draft.draft_model import DraftModelDrafter
from paceline.errors import DraftMismatchError
from paceline.params import SamplingParams
from paceline.testing import ToyModel
from paceline.types import RequestView
from piece_tokenizer import PieceTokenizer
from toy_engine import make_engine, run

LETTERS = [bytes([byte]) for byte in b"abcde ."]
TARGET = PieceTokenizer(
    [*LETTERS, b"ab", b"bc", b" c", b"\xc3", b"\xa9", b"dd"], specials=["<tool>", "<eos>", "<only target's>"]
)
OWN = PieceTokenizer(
    [b"\xa9", b" a", *LETTERS[::-1], b"\xc3", b"ab", b"cde"], specials=["<eos>", "<only own>", "<tool>"]
)
SAMPLE = "abcde. ab é"
PROMPT = TARGET.encode("abc dd. ab é")


def vocabulary(target=TARGET, own=OWN, **options) -> CrossVocabulary:
    sizes = {"target_size": target.vocab_size, "own_size": own.vocab_size}
    return CrossVocabulary(target, own, **{**sizes, "sample_text": SAMPLE, **options})


def target_model() -> ToyModel:
    return ToyModel(vocab_size=TARGET.vocab_size, seed=3, order=3, num_blocks=64, block_size=4, max_model_len=128)


def drafter(*, rule_needs_law: bool = False, subject: CrossVocabulary | None = None, **options) -> DraftModelDrafter:
    model = ToyModel(vocab_size=OWN.vocab_size, **{"seed": 5, "order": 2, "num_blocks": 64, "block_size": 4, **options})
    return DraftModelDrafter(
        model,
        vocabulary=subject or vocabulary(),
        rule_needs_law=rule_needs_law,
        least_reach=0.0,
        eos_ids=TARGET.eos_ids,
        max_num_batched_tokens=7,
    )


def view(token_ids, *, request_id="r", attempt=0, seed=11, **params) -> RequestView:
    return RequestView(request_id, np.array(token_ids, np.int32), 3, SamplingParams(**params), seed, 0, attempt)


PARAMS = [
    {},
    {"temperature": 0.8},
    {"temperature": 0.8, "repetition_penalty": 1.3, "presence_penalty": 0.5, "logit_bias": {4: 2.0, 10: -3.0}},
    {"temperature": 1.2, "top_k": 4, "allowed_token_ids": range(3, 12), "min_tokens": 9},
    {"temperature": 0.8, "allowed_token_ids": [10, 15], "frequency_penalty": -0.5},
    {"temperature": 0.8, "allowed_token_ids": [15], "ignore_eos": True},  # a token that only the target has
]


@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize("blocks", [64, 9])
def test_a_batch_is_written_as_without_a_drafter(params, blocks):
    each = [SamplingParams(max_tokens=n, seed=n, **params) for n in (40, 25, 33)]
    prompts = [PROMPT, PROMPT[2:5], TARGET.encode("de")]
    plain = run(make_engine(runner=target_model(), tokenizer=TARGET), prompts, each)
    engine = make_engine(runner=target_model(), tokenizer=TARGET, drafter=drafter(num_blocks=blocks))
    drafted = run(engine, prompts, each)
    assert [output.token_ids for output in drafted] == [output.token_ids for output in plain]
    assert engine.metrics.num_draft_tokens > 0 or params.get("allowed_token_ids") == [15]


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_greedy_text_is_the_targets_under_the_rules_on_laws(rule):
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    (plain,) = run(make_engine(runner=target_model(), tokenizer=TARGET), [PROMPT], params)
    engine = make_engine(runner=target_model(), tokenizer=TARGET, rule=rule, drafter=drafter(rule_needs_law=True))
    assert run(engine, [PROMPT], params)[0].token_ids == plain.token_ids
    assert engine.metrics.num_draft_tokens > 0


class Renamed(ToyModel):
    """The target's law under the draft model's ids, where both have the token; what is not common is likelier still."""

    def __init__(self, subject: CrossVocabulary, own: PieceTokenizer, target: ToyModel) -> None:
        super().__init__(vocab_size=own.vocab_size, order=1, num_blocks=64, block_size=4)
        self._own, self._target, self._ids = own, target, subject.token_map.ids

    def _draw(self, words: tuple[int, ...], *, drifts: tuple[float, ...]) -> np.ndarray:
        spelling = self._own.token_bytes()[words[-1]] or b" "
        common = self._own.id_of(spelling[-1:])
        row = self._target._draw((int(self._ids[common]),), drifts=drifts)
        return np.where(self._ids >= 0, row[self._ids], 9.0).astype(np.float32)


@pytest.mark.parametrize("temperature", [0.0, 0.8, 1.5])
def test_models_that_agree_draw_the_same_tokens(temperature):
    """Over the common tokens the laws are equal, the noise is that of the target's ids: all drafts are accepted."""
    target = PieceTokenizer([*LETTERS, b"\xa9"])
    own = PieceTokenizer([b"ab", *LETTERS[::-1], b" cd"], specials=["<x>", "<eos>"])
    subject = vocabulary(target, own, sample_text="abcd. ab")
    model = ToyModel(vocab_size=target.vocab_size, seed=3, order=1, num_blocks=64, block_size=4, max_model_len=128)
    common = [int(i) for i in subject.token_map.ids if i > 0]
    params = SamplingParams(max_tokens=60, temperature=temperature, seed=1, allowed_token_ids=common)
    prompt = target.encode("abc d")
    (plain,) = run(make_engine(runner=model, tokenizer=target), [prompt], params)
    renamed = DraftModelDrafter(Renamed(subject, own, model), vocabulary=subject, rule_needs_law=False, least_reach=0.0)
    engine = make_engine(runner=model, tokenizer=target, drafter=renamed)
    assert run(engine, [prompt], params)[0].token_ids == plain.token_ids
    assert engine.metrics.acceptance_rate == 1.0


def test_special_tokens_are_never_drafted():
    """<eos> ends both's texts and may be; <tool> has the same name, and yet may not."""
    subject = drafter()
    drafts = []
    for seed in range(40):
        (draft,) = subject.propose([view(PROMPT, request_id=str(seed), seed=seed, temperature=2.0)], [6])
        assert draft is not None
        drafts += draft.token_ids.tolist()
        subject.release(str(seed))
    assert set(drafts) & TARGET.special_ids == TARGET.eos_ids


def test_the_text_is_read_in_the_models_own_tokens():
    subject = vocabulary()
    read = subject.read(view([0, *TARGET.encode(" cde ab"), 2, *TARGET.encode("dd")]))
    assert read is not None
    texts = [OWN.token_text(i) for i in read.tolist()]
    assert texts == ["<tool>", " ", "cde", " a", "b", "d", "d"]  # what only the target has, is left out
    subject.release("r")
    assert subject.read(view([2])) is None


def test_no_draft_in_the_middle_of_a_character():
    subject = drafter()
    assert subject.propose([view([*PROMPT, TARGET.id_of(b"\xc3")])], [4]) == [None]
    (draft,) = subject.propose([view([*PROMPT, TARGET.id_of(b"\xc3"), TARGET.id_of(b"\xa9")])], [4])
    assert draft is not None


def test_drafts_are_spelled_as_the_target_would():
    subject = vocabulary()
    a, b, c, d = (TARGET.id_of(bytes([byte])) for byte in b"abcd")
    known = view(TARGET.encode("e d"))
    assert subject.read(known) is not None
    assert subject.respell(known, [a, b, b, c]) == [TARGET.id_of(b"ab"), TARGET.id_of(b"bc")]
    assert subject.respell(known, [d]) == [d]  # the known text would be spelled otherwise, too
    assert subject.respell(known, [a, TARGET.id_of(b"\xc3")]) == [a, TARGET.id_of(b"\xc3")]
    assert subject.respell(known, [a, b, 1]) == [a, b, 1]


def test_accepted_tokens_are_not_computed_again():
    model = ToyModel(vocab_size=OWN.vocab_size, seed=5, order=2, num_blocks=64, block_size=4)
    subject = DraftModelDrafter(model, vocabulary=vocabulary(), rule_needs_law=False, least_reach=0.0)
    (draft,) = subject.propose([view(PROMPT)], [4])
    assert draft is not None
    before = model.num_tokens
    subject.propose([view([*PROMPT, *draft.token_ids.tolist(), TARGET.id_of(b".")])], [4])
    assert model.num_tokens - before < 12


def test_few_common_tokens_are_refused_unless_forced():
    strange = PieceTokenizer([b"ab", b"cd", *(bytes([byte]) for byte in b"abcde. \xc3\xa9")])
    target = PieceTokenizer([b"abc", b"de. ", b"ab ", b"\xc3\xa9", *LETTERS])
    with pytest.raises(DraftMismatchError, match=r"has 0% of the target.s tokens in a sample text"):
        vocabulary(target, strange)
    assert vocabulary(target, strange, force=True).coverage == 0
    assert vocabulary().coverage > 0.5
    assert vocabulary().note == "draft model with 68.8% of the vocabulary, 100% of a sample text"


def test_a_tokenizer_that_changes_the_text_is_refused():
    class Lower(PieceTokenizer):
        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            return super().encode(text.replace(" ", ""), add_special_tokens=add_special_tokens)

    with pytest.raises(DraftMismatchError, match="changes the text"):
        vocabulary(own=Lower([*LETTERS, b"\xc3", b"\xa9"]))
