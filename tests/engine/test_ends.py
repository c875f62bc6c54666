"""Where an output ends: text, ids, usage, log-probabilities and cache are those of plain decoding."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.params import SamplingParams
from paceline.types import RequestOutput
from toy_engine import PROMPT, TOKENIZER, make_engine, oracle, run


def plain_output(params: SamplingParams) -> RequestOutput:
    return run(make_engine(), [PROMPT], params)[0]


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=1),
        SamplingParams(max_tokens=7),
        SamplingParams(max_tokens=9),
        SamplingParams(max_tokens=40, stop=("{a}",)),
        SamplingParams(max_tokens=40, stop=("{ab}", "zzz")),
        SamplingParams(max_tokens=40, min_tokens=12, stop=("{a}",)),
        SamplingParams(max_tokens=40, stop_token_ids=(0,)),
        SamplingParams(max_tokens=40, temperature=0.9, seed=11),
        SamplingParams(max_tokens=40, temperature=0.9, seed=11, ignore_eos=True),
        SamplingParams(max_tokens=200, temperature=0.9, seed=12, ignore_eos=True),
        SamplingParams(max_tokens=40, temperature=0.9, seed=5, min_tokens=30),
    ],
    ids=str,
)
def test_ends_inside_an_accepted_path_are_those_of_plain_decoding(params: SamplingParams, tree: bool) -> None:
    params = _fill_in(params)
    plain_engine = make_engine()
    plain = run(plain_engine, [PROMPT], params)[0]
    known = [*PROMPT, *plain.token_ids]
    beyond = [*known, *known]  # the draft goes on past every end
    engine = make_engine(oracle(beyond, tree=tree), num_draft_tokens=6)
    speculative = run(engine, [PROMPT], params)[0]
    assert speculative.outputs[0].token_ids == plain.outputs[0].token_ids
    assert speculative.text == plain.text
    assert speculative.outputs[0].finish_reason == plain.outputs[0].finish_reason
    assert speculative.outputs[0].stop_reason == plain.outputs[0].stop_reason
    metrics = speculative.metrics
    assert metrics.num_steps + metrics.num_accepted_tokens == len(plain.token_ids)
    assert metrics.acceptance_length == pytest.approx(len(plain.token_ids) / metrics.num_steps)
    if len(plain.token_ids) > 2:
        assert metrics.num_accepted_tokens > 0
    assert engine.cache.num_free_blocks == plain_engine.cache.num_free_blocks == engine.cache.num_blocks
    found = [e.cache.match_prefix("probe", np.array([*known, 0], dtype=np.int32)) for e in (engine, plain_engine)]
    assert found[0] == found[1]
    assert len(speculative.outputs[0].origins) == len(speculative.token_ids)


def _fill_in(params: SamplingParams) -> SamplingParams:
    """Stops that the plain text really meets: its tokens 5 to 7, as text or as an id."""
    from dataclasses import replace

    plain = run(make_engine(), [PROMPT], SamplingParams(max_tokens=40))[0]
    first, both = TOKENIZER.decode(plain.token_ids[5:6]), TOKENIZER.decode(plain.token_ids[5:8])
    stop = tuple(s.replace("{ab}", both).replace("{a}", first) for s in params.stop)
    ids = (plain.token_ids[6],) if params.stop_token_ids else ()
    return replace(params, stop=stop, stop_token_ids=ids)


def test_eos_ends_the_output_inside_a_path_and_is_not_part_of_the_text() -> None:
    for seed in range(40):
        params = SamplingParams(max_tokens=60, temperature=1.2, seed=seed, skip_special_tokens=False)
        plain = plain_output(params)
        if plain.outputs[0].finish_reason == "stop" and len(plain.token_ids) > 6:
            break
    else:
        pytest.fail("no seed met the end-of-text token")
    speculative = run(make_engine(oracle([*PROMPT, *plain.token_ids, 3, 4, 5])), [PROMPT], params)[0]
    assert speculative.token_ids == plain.token_ids
    assert speculative.token_ids[-1] in TOKENIZER.eos_ids
    assert speculative.text == plain.text == TOKENIZER.decode(plain.token_ids[:-1], skip_special_tokens=False)
    assert speculative.outputs[0].origins[-1] == "accepted"
    assert speculative.metrics.acceptance_length == len(plain.token_ids) / speculative.metrics.num_steps


@pytest.mark.parametrize("length", [126, 127])
def test_the_end_of_the_context_clips_drafts_and_output(length: int) -> None:
    prompt = (PROMPT * 10)[:length]
    params = SamplingParams(max_tokens=50, ignore_eos=True)
    plain = run(make_engine(), [prompt], params)[0]
    assert len(plain.token_ids) == 128 - length
    speculative = run(make_engine(oracle([*prompt, *plain.token_ids, 2, 3, 4])), [prompt], params)[0]
    assert speculative.token_ids == plain.token_ids
    assert speculative.outputs[0].finish_reason == "length"


@pytest.mark.parametrize("rule", ["coupled", "rejection", "block", "typical"])
def test_logprobs_are_those_of_plain_decoding(rule: str) -> None:
    params = SamplingParams(max_tokens=12, logprobs=3, prompt_logprobs=2)
    plain = plain_output(params)
    wrong = frozenset({len(PROMPT) + 3, len(PROMPT) + 4})
    engine = make_engine(oracle([*PROMPT, *plain.token_ids], wrong_at=wrong), rule=rule)
    speculative = run(engine, [PROMPT], params)[0]
    assert speculative.token_ids == plain.token_ids
    assert speculative.outputs[0].logprobs == plain.outputs[0].logprobs
    assert speculative.prompt_logprobs == plain.prompt_logprobs
    assert plain.prompt_logprobs is not None
    assert len(plain.prompt_logprobs) == len(PROMPT)
    assert [t.token_id for t in plain.prompt_logprobs[1:] if t] == PROMPT[1:]
    assert all(t.rank == 1 and len(t.top) == 3 for t in plain.outputs[0].logprobs or ())


def test_prompt_logprobs_do_not_read_the_prefix_cache() -> None:
    engine = make_engine()
    params = SamplingParams(max_tokens=3, prompt_logprobs=1)
    first, second = run(engine, [PROMPT], params)[0], run(engine, [PROMPT], params)[0]
    assert first.prompt_logprobs == second.prompt_logprobs
    assert second.num_cached_tokens == 0
    assert run(engine, [PROMPT], SamplingParams(max_tokens=3))[0].num_cached_tokens == 12


def test_metrics_count_as_the_glossary_says() -> None:
    params = SamplingParams(max_tokens=11, ignore_eos=True)
    plain = plain_output(params)
    engine = make_engine(oracle([*PROMPT, *plain.token_ids], wrong_at=frozenset({len(PROMPT) + 3})))
    output = run(engine, [PROMPT], params)[0]
    # Steps: the prompt yields token 0; then tokens 1, 2 accepted and 3 recovered; then 4..7 accepted and 8 a bonus;
    # then 9 accepted (one draft token fits below max_tokens) and 10 a bonus.
    assert output.outputs[0].origins == (
        "plain", "accepted", "accepted", "recovered", *["accepted"] * 4, "bonus", "accepted", "bonus",
    )  # fmt: skip
    metrics = output.metrics
    assert (metrics.num_steps, metrics.num_drafts, metrics.num_draft_tokens) == (4, 3, 9)
    assert metrics.num_accepted_tokens == 7
    assert metrics.num_accepted_tokens_per_pos == (3, 2, 1, 1)
    assert metrics.acceptance_length == 1 + 7 / 4
    assert metrics.acceptance_rate == 7 / 9


def test_requests_can_decline_speculation() -> None:
    engine = make_engine(oracle([*PROMPT, *[3] * 20]))
    output = run(engine, [PROMPT], SamplingParams(max_tokens=6, speculation=False))[0]
    assert output.metrics.num_drafts == 0
    assert set(output.outputs[0].origins) == {"plain"}
