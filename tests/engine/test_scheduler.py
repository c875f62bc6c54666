"""Who gets into a step, in which order, and what gives way."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.params import SamplingParams
from paceline.testing import ToyModel
from toy_engine import PROMPT, TOKENIZER, make_engine

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


def running(engine) -> list[str]:
    return [sequence.id for sequence in engine.scheduler.running]


def step_until(engine, done) -> None:
    for _ in range(500):
        if done():
            return
        engine.step()
        engine.check_integrity()
    pytest.fail("it did not happen within 500 steps")


def test_more_important_requests_come_first_and_take_the_place_of_the_last() -> None:
    engine = make_engine(max_num_seqs=2, max_num_batched_tokens=64)
    for priority in (1, 0, 2):
        engine.add_request(PROMPT, PARAMS, priority=priority)
    engine.step()
    assert running(engine) == ["2/0", "1/0"]
    assert [sequence.id for sequence in engine.scheduler.waiting] == ["3/0"]
    engine.add_request(PROMPT, PARAMS, priority=1)  # as important as one that runs, but later
    engine.step()
    assert running(engine) == ["2/0", "1/0"]
    engine.add_request(PROMPT, PARAMS, priority=-1)
    engine.step()
    assert running(engine) == ["5/0", "2/0"]
    assert [sequence.id for sequence in engine.scheduler.waiting] == ["1/0", "4/0", "3/0"]


def test_who_lacks_blocks_takes_them_from_the_least_important_the_youngest_first() -> None:
    toy = ToyModel(vocab_size=TOKENIZER.vocab_size, seed=3, order=3, num_blocks=20, block_size=4, max_model_len=80)
    engine = make_engine(runner=toy, max_num_batched_tokens=64, prefix_caching=False)
    for priority in (1, 0, 0, 1):
        engine.add_request(PROMPT, PARAMS, priority=priority)
    gone = []
    for _ in range(40):
        before = running(engine)
        engine.step()
        gone += [key for key in before if key in [s.id for s in engine.scheduler.waiting]]
    assert gone == ["4/0", "1/0"]


def test_many_choices_share_places_with_later_requests() -> None:
    """Half of the places go to those that come while a request of 64 choices has all of them."""
    engine = make_engine(max_num_seqs=8, max_num_batched_tokens=64)
    engine.add_request(PROMPT, SamplingParams(n=64, temperature=1.0, seed=1, max_tokens=60, ignore_eos=True))
    step_until(engine, lambda: len(running(engine)) == 8)
    for number in range(2, 10):
        engine.add_request(PROMPT, PARAMS)
        step_until(engine, lambda number=number: f"{number}/0" in running(engine) or number > 5)
    assert running(engine) == ["1/0", "2/0", "1/1", "3/0", "1/2", "4/0", "1/3", "5/0"]


@pytest.mark.parametrize("max_num_seqs", [1, 2, 3])
def test_no_choice_waits_for_more_requests_than_its_number(max_num_seqs: int) -> None:
    """A new request comes in every step, more than there is room for; still choice i waits for at most i of them."""
    engine = make_engine(max_num_seqs=max_num_seqs, max_num_batched_tokens=64)
    first = engine.new_request(PROMPT, SamplingParams(n=12, temperature=1.0, seed=1, max_tokens=3, ignore_eos=True))
    engine.add(first)
    begun: list[str] = []
    for _ in range(80):
        engine.add_request(PROMPT, SamplingParams(max_tokens=4, ignore_eos=True))
        engine.step()
        begun += [key for key in running(engine) if key not in begun]
    for choice in range(12):
        before = begun[: begun.index(f"1/{choice}")]
        assert sum(not key.startswith("1/") for key in before) <= choice


def test_short_prompts_pass_a_long_one_and_do_not_hold_it_up() -> None:
    """Short prompts that come without end get half of a step, the long one the other half."""
    engine = make_engine(max_num_seqs=8, max_num_batched_tokens=32, prefix_caching=False)
    engine.add_request(LONG, SamplingParams(max_tokens=1))
    engine.step()
    assert engine.scheduler.running[0].num_computed == 32
    for number in range(2, 6):
        engine.add_request(PROMPT[:10], SamplingParams(max_tokens=1))
        engine.add_request(PROMPT[:6], SamplingParams(max_tokens=1))
        if "1" in engine.requests:
            long = engine.scheduler.running[0]
            before = long.num_computed
            ended = {delta.request_id for delta in engine.step() if delta.output is not None}
            assert long.num_computed - before == min(16, len(LONG) - before)
            assert {str(2 * number - 2), str(2 * number - 1)} <= ended
    assert "1" not in engine.requests


def test_a_long_prompt_that_waits_takes_its_place_though_short_ones_passed_it() -> None:
    engine = make_engine(max_num_seqs=2, max_num_batched_tokens=32, prefix_caching=False)
    engine.add_request(LONG, SamplingParams(max_tokens=1))
    engine.add_request(LONG, SamplingParams(max_tokens=1))
    engine.step()
    engine.add_request(PROMPT, PARAMS)
    engine.step()
    assert running(engine) == ["1/0", "3/0"]
    engine.add_request(PROMPT, PARAMS)
    step_until(engine, lambda: "1" not in engine.requests)
    engine.step()
    assert running(engine)[0] == "2/0"
    step_until(engine, lambda: not engine.has_unfinished)


def test_a_choice_that_waits_for_its_prompt_lets_others_pass() -> None:
    engine = make_engine(max_num_seqs=8, max_num_batched_tokens=32, prefix_caching=False)
    engine.add_request(LONG, SamplingParams(max_tokens=9, n=3, seed=1, temperature=1.0))
    engine.step()
    engine.add_request(PROMPT[:5], PARAMS)
    engine.step()
    assert running(engine) == ["1/0", "2/0"]
    step_until(engine, lambda: running(engine) == ["1/0", "2/0", "1/1", "1/2"])


def test_drafts_share_the_tokens_that_a_step_has_left() -> None:
    engine = make_engine(lambda view: None, max_num_batched_tokens=64)
    for max_tokens in (20, 3, 20, 20):
        engine.add_request(PROMPT, SamplingParams(max_tokens=max_tokens, ignore_eos=True))
    engine.step()
    engine.scheduler.config = replace(engine.scheduler.config, max_num_batched_tokens=12)
    assert {key: limit for key, (_, limit) in plan_of(engine).items()} == {"1/0": 3, "2/0": 1, "3/0": 2, "4/0": 2}


def test_prefix_hits_are_counted_once_a_sequence_and_choices_that_share_are_not() -> None:
    engine = make_engine(max_num_batched_tokens=64)
    for n in (1, 3):
        engine.add_request(PROMPT, SamplingParams(max_tokens=2, n=n, seed=1))
        step_until(engine, lambda: not engine.has_unfinished)
    assert engine.scheduler.num_prefix_queries == 2 * len(PROMPT)
    assert engine.scheduler.num_prefix_hits == (len(PROMPT) - 1) // 4 * 4
