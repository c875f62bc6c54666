"""Who gets into a step, in which order, and what gives way."""

from __future__ import annotations

from paceline.types import SamplingParams
from toy_engine import PROMPT, make_engine

LONG = (PROMPT * 5)[:70]
PARAMS = SamplingParams(max_tokens=20, ignore_eos=True)


def plan_of(engine) -> dict[str, tuple[int, int]]:
    """Sequence -> (pending tokens, draft limit) of the next step."""
    plan, _ = engine.scheduler.schedule()
    engine.scheduler.roll_back(plan)
    return {part.sequence.id: (part.num_tokens, part.draft_limit) for part in plan}


def test_long_prompts_come_in_chunks_and_decoding_goes_first() -> None:
    engine = make_engine(lambda view: None, max_num_batched_tokens=32, prefix_caching=False)
    engine.add_request(PROMPT, PARAMS)
    engine.step()
    engine.add_request(LONG, PARAMS)
    engine.step()
    assert plan_of(engine) == {"1/0": (1, 0), "2/0": (31, 0)}  # the chunk leaves no room for drafts
    engine.step()
    assert plan_of(engine) == {"1/0": (1, 4), "2/0": (8, 0)}  # what the last chunk leaves goes to drafts
    engine.step()
    assert plan_of(engine) == {"1/0": (1, 4), "2/0": (1, 4)}


def test_drafts_never_keep_a_prompt_out() -> None:
    engine = make_engine(lambda view: None, max_num_batched_tokens=17, prefix_caching=False)
    engine.add_request(PROMPT, PARAMS)
    engine.step()
    engine.add_request(PROMPT[:14], PARAMS)
    assert plan_of(engine) == {"1/0": (1, 2), "2/0": (14, 0)}


def test_requests_are_admitted_in_order_up_to_the_limit() -> None:
    engine = make_engine(max_num_seqs=2, max_num_batched_tokens=64)
    for _ in range(3):
        engine.add_request(PROMPT, PARAMS)
    assert list(plan_of(engine)) == ["1/0", "2/0"]
    assert [sequence.id for sequence in engine.scheduler.waiting] == ["3/0"]


def test_a_draft_is_clipped_to_what_may_still_be_written() -> None:
    engine = make_engine(lambda view: None)
    engine.add_request(PROMPT, SamplingParams(max_tokens=3, ignore_eos=True))
    engine.step()
    assert plan_of(engine) == {"1/0": (1, 1)}
    engine.step()
    assert plan_of(engine) == {"1/0": (1, 0)}
