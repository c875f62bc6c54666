"""The arithmetic of `paceline bench`, against figures worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.bench.report import _student, summarize
from paceline.bench.runner import Measurement, Sample
from paceline.bench.workload import Prompt
from paceline.types import Completion, RequestOutput, SpeculationMetrics

CHAT, CODE = Prompt("a", "chat", ("x",)), Prompt("b", "code", ("y",))


def sample(prompt, mode, *, tokens, prefill, decode, seconds, metrics=None):
    ids = tuple(range(tokens))
    output = RequestOutput(
        request_id="r",
        prompt=None,
        prompt_token_ids=(1,),
        outputs=(Completion(index=0, text="", token_ids=ids, finish_reason="length"),),
        seed=0,
        finished=True,
        lossless=True,
        reproducible=True,
        metrics=metrics or SpeculationMetrics(),
        prefill_seconds=prefill,
        decode_seconds=decode,
    )
    return Sample(prompt, mode, output, seconds)


def measurement(*, repeats: int = 1, code_tokens: int = 5):
    drafted = SpeculationMetrics(
        num_drafts=4, num_draft_tokens=20, num_accepted_tokens=6, num_accepted_tokens_per_pos=(4, 2), num_steps=4
    )
    samples = []
    for repeat in range(repeats):
        slower = 1 + repeat  # the median of 1, 2, 3 is 2
        samples += [
            sample(CHAT, "plain", tokens=11, prefill=1 * slower, decode=10 * slower, seconds=11 * slower),
            sample(CHAT, "speculative", tokens=11, prefill=1, decode=5, seconds=6, metrics=drafted),
            sample(CODE, "plain", tokens=5, prefill=2 * slower, decode=4 * slower, seconds=6 * slower),
            sample(CODE, "speculative", tokens=code_tokens, prefill=2, decode=1, seconds=3, metrics=drafted),
        ]
    plain = tuple(17.0 * (1 + repeat) for repeat in range(repeats))
    return Measurement(tuple(samples), {"plain": plain, "speculative": (9.0,) * repeats})


def test_one_run():
    report = summarize(measurement())
    plain = report["plain"]
    assert plain["requests"] == 2
    assert plain["tokens"] == 16
    assert (plain["prefill_seconds"], plain["decode_seconds"], plain["wall_seconds"]) == (3, 14, 17)
    assert plain["tokens_per_second"] == pytest.approx(16 / 17)
    assert plain["decode_tokens_per_second"] == pytest.approx(14 / 14)  # without each request's first token
    assert plain["by_category"]["chat"]["tokens_per_second"] == pytest.approx(11 / 11)
    assert plain["by_category"]["code"]["decode_tokens_per_second"] == pytest.approx(4 / 4)
    assert report["speedup"] == pytest.approx(17 / 9)
    assert report["speedup_range"] is None
    assert report["decode_speedup"] == pytest.approx(14 / 6)
    assert report["by_category"] == {
        "chat": {"speedup": pytest.approx(11 / 6), "decode_speedup": pytest.approx(2), "decode_speedup_bound": None},
        "code": {"speedup": pytest.approx(2), "decode_speedup": pytest.approx(4), "decode_speedup_bound": None},
    }
    assert report["acceptance_length"] == pytest.approx(1 + 12 / 8)
    assert report["acceptance_rate"] == pytest.approx(12 / 40)
    assert report["identical"] == 2


def test_repeats_take_medians():
    report = summarize(measurement(repeats=3))
    assert report["speedup_range"] == pytest.approx((17 / 9, 51 / 9))
    assert report["plain"]["tokens"] == 16
    assert report["plain"]["wall_seconds"] == 34
    assert report["plain"]["decode_seconds"] == 28
    assert report["decode_speedup"] == pytest.approx(28 / 6)


def test_bounds_are_students():
    """The ratios of the repeats are 1 to 5 times the first one's."""
    report = summarize(measurement(repeats=5))
    logs = np.log(np.arange(1, 6))
    bound = np.exp(logs.mean() - 2.1318 * logs.std(ddof=1) / np.sqrt(5))
    assert report["decode_speedup_bound"] == pytest.approx(14 / 6 * bound, rel=1e-3)
    assert report["speedup_bound"] == pytest.approx(17 / 9 * bound, rel=1e-3)
    assert report["by_category"]["chat"]["decode_speedup_bound"] == pytest.approx(2 * bound, rel=1e-3)
    assert summarize(measurement(repeats=2))["speedup_bound"] is None


def test_a_bound_is_never_above_its_speedup():
    samples = [
        sample(CHAT, mode, tokens=5, prefill=1, decode=seconds, seconds=seconds)
        for mode, runs in (("plain", (4.0, 4.0, 4.0)), ("speculative", (2.0, 4.0, 4.0)))
        for seconds in runs
    ]
    walls = {"plain": (4.0,) * 9, "speculative": (4.0,) * 5 + (3.9, 3.9, 3.9, 3.9)}
    assert summarize(Measurement(tuple(samples), walls))["speedup_bound"] == 1.0


def test_bounds_are_of_rates_where_texts_differ():
    report = summarize(measurement(repeats=3, code_tokens=13))
    logs = np.log(np.arange(1, 4))
    bound = np.exp(logs.mean() - 2.9200 * logs.std(ddof=1) / np.sqrt(3))
    assert report["decode_speedup_bound"] == pytest.approx(22 / 6 * bound, rel=5e-3)
    assert report["speedup_bound"] == pytest.approx(24 / 16 * 17 / 9 * bound, rel=5e-3)


@pytest.mark.parametrize(("freedom", "value"), [(2, 2.920), (4, 2.132), (9, 1.833), (30, 1.697)])
def test_students_percentile(freedom, value):
    assert _student(freedom) == pytest.approx(value, rel=6e-3)


def test_without_noise_the_bound_is_the_ratio():
    samples = tuple(
        sample(prompt, mode, tokens=5, prefill=1, decode=seconds, seconds=seconds)
        for prompt in (CHAT, CODE)
        for mode, seconds in (("plain", 6.0), ("speculative", 4.0))
        for _ in range(3)
    )
    report = summarize(Measurement(samples, {"plain": (12.0,) * 3, "speculative": (8.0,) * 3}))
    assert report["decode_speedup_bound"] == report["speedup_bound"] == pytest.approx(1.5)


def test_texts_that_differ_are_counted():
    assert summarize(measurement(code_tokens=4))["identical"] == 1


def test_one_token_answers_have_no_decode_rate():
    samples = tuple(sample(CHAT, mode, tokens=1, prefill=1, decode=0, seconds=1) for mode in ("plain", "speculative"))
    report = summarize(Measurement(samples, {"plain": (1.0,), "speculative": (1.0,)}))
    assert report["plain"]["decode_tokens_per_second"] == 0
    assert report["decode_speedup"] is None
    assert report["speedup"] == 1
