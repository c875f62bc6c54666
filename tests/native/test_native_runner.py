"""NativeRunner: formats against their dequantised weights, instruction sets, sampling, moves, limits and refusals."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from batches import make_batch, random_tokens
from native_models import (
    CASES,
    CONTEXT,
    PLAIN,
    assert_same_bits,
    case_runner,
    case_weights,
    instruction_sets,
    packed_floats,
    plain_rows,
    random_weights,
)
from paceline.errors import CacheError, ConfigError, PacelineError
from paceline.models.native_runner import NativeRunner, kv_bytes_per_block
from paceline.models.native_weights import PackedWeights
from paceline.types import RowSampling

TOKENS = random_tokens(40)
WHOLE = {"tokens": TOKENS, "context": 0, "table": range(12)}


def logits_of(runner: NativeRunner, requests: list[dict] | None = None) -> np.ndarray:
    logits = runner.forward(make_batch(requests or [WHOLE], block_size=runner.kv.block_size)).logits
    assert logits is not None
    return logits


def greedy(rows: int, **changes) -> RowSampling:
    return dataclasses.replace(
        RowSampling(
            temperature=np.zeros(rows, np.float32), top_k=np.zeros(rows, np.int32), top_p=np.ones(rows, np.float32),
            min_p=np.zeros(rows, np.float32), seed=np.zeros(rows, np.uint64), stream=np.zeros(rows, np.uint32),
            position=np.arange(rows, dtype=np.uint32), purpose=np.zeros(rows, np.uint32),
        ),
        **changes,
    )  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_each_format_is_near_its_dequantised_weights(case: str) -> None:
    """What differs is the rounding of activations to int8."""
    spec, weights = CASES[case][0], case_weights(case)
    floats = {name: matrix.unpack() for name, matrix in weights.matrices.items()} | dict(weights.vectors)
    exact = NativeRunner(spec, packed_floats(floats), num_blocks=12, block_size=16, max_model_len=CONTEXT)
    ours, theirs = logits_of(case_runner(case)), logits_of(exact)
    relative = np.linalg.norm(ours - theirs) / np.linalg.norm(theirs)
    assert relative < (0.05 if case not in ("f32", "f32-everything", "bf16", "f16") else 1e-4)


@pytest.mark.parametrize("isa", instruction_sets()[:-1])
@pytest.mark.parametrize("case", CASES)
def test_instruction_sets_agree_with_portable_code(case: str, isa: str) -> None:
    vector, portable = case_runner(case, isa=isa), case_runner(case, isa="portable")
    assert (vector.isa, portable.isa) == (isa, "portable")
    ours, theirs = logits_of(vector), logits_of(portable)
    assert np.linalg.norm(ours - theirs) / np.linalg.norm(theirs) < 0.02  # an activation between two quants tips it all
    starts = [{"tokens": [token], "context": 0, "table": [i]} for i, token in enumerate(TOKENS)]
    ours, theirs = logits_of(vector, starts), logits_of(portable, starts)
    assert np.median(np.abs(ours - theirs).max(axis=1)) < 1e-4  # most rows meet no such activation


def test_the_environment_chooses_the_instruction_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_ISA", "portable")
    assert case_runner("f32").isa == "portable"
    monkeypatch.setenv("PACELINE_ISA", "abacus")
    with pytest.raises(ConfigError, match="abacus"):
        case_runner("f32")


@pytest.mark.parametrize("kv_cache_dtype", ["int16", "int8"])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_move_reads_all_sources_before_it_writes(kv_cache_dtype: str, block_size: int) -> None:
    """The context's keys, permuted by a move into other slots, read through a table that follows the move."""
    runner = case_runner("f32-everything", kv_cache_dtype=kv_cache_dtype, block_size=block_size)
    plain = plain_rows("f32-everything", kv_cache_dtype)
    blocks = np.arange(32 // block_size)
    table = np.random.default_rng(0).permutation(blocks)
    logits_of(runner, [{"tokens": TOKENS[:32], "context": 0, "table": table}])
    shuffled = np.random.default_rng(1).permutation(blocks)
    places = np.arange(block_size)
    sources, targets = ((order[:, None] * block_size + places).reshape(-1) for order in (blocks, shuffled))
    runner.move(sources.astype(np.int64), targets.astype(np.int64))  # block i is now block shuffled[i]
    follow = {"tokens": TOKENS[32:], "context": 32, "table": [*shuffled[table], *range(len(blocks), len(blocks) + 8)]}
    assert_same_bits(logits_of(runner, [follow]), plain(TOKENS)[32:])


def test_only_wanted_rows_get_logits() -> None:
    runner = case_runner("int4")
    everything = logits_of(runner)
    some = runner.forward(make_batch([WHOLE], block_size=16, logit_rows=np.array([8, 2, 8], dtype=np.int32))).logits
    assert_same_bits(some, everything[[8, 2, 8]])
    none = runner.forward(make_batch([WHOLE], block_size=16, logit_rows=np.array([], dtype=np.int32)))
    assert none.logits.shape == (0, PLAIN.vocab_size)


def test_sampled_rows_come_from_the_logits() -> None:
    runner = case_runner("q8_0")
    logits = logits_of(runner)
    batch = make_batch([WHOLE], block_size=16, hidden_layers=("final",))
    output = runner.forward(batch, greedy(len(logits)))
    np.testing.assert_array_equal(output.token_ids, logits.argmax(axis=1))
    assert output.logits is None
    assert output.hidden["final"].shape == (len(TOKENS), CASES["q8_0"][0].hidden_size)
    wanted = runner.forward(batch, greedy(len(logits), want_logits=True, want_laws=True, num_logprobs=2))
    assert_same_bits(wanted.logits, logits)
    assert wanted.laws.shape == logits.shape
    np.testing.assert_array_equal(wanted.logprobs.top_ids[:, 0], logits.argmax(axis=1))


def test_layout_and_limits() -> None:
    runner = case_runner("f32")
    assert runner.spec is PLAIN
    assert (runner.vocab_size, runner.max_model_len) == (PLAIN.vocab_size, CONTEXT)
    assert (runner.kv.num_blocks, runner.kv.block_size) == (48, 16)
    assert runner.kv.bytes_per_block == kv_bytes_per_block(PLAIN, block_size=16, kv_cache_dtype="int16")
    assert kv_bytes_per_block(PLAIN, block_size=16, kv_cache_dtype="int16") == 3 * 16 * 2 * 2 * (2 * 16 + 4)
    int8 = kv_bytes_per_block(PLAIN, block_size=16, kv_cache_dtype="int8")
    assert int8 == 3 * 16 * 2 * 2 * (16 + 4)  # a float32 scale for each token and head
    small = case_runner("f32", num_blocks=3)
    assert small.max_model_len == 48  # the pool's


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_model_len": CONTEXT + 1}, f"max_model_len must be at most the model's context of {CONTEXT}; got"),
        ({"kv_cache_dtype": "float32"}, "kv_cache_dtype must be one of int16, int8; got 'float32'"),
        ({"num_threads": 10**20}, f"num_threads must be from 1 to 1024; got {10**20}"),
        ({"num_threads": -1}, "num_threads must be from 1 to 1024; got -1"),
        ({"isa": "abacus"}, "abacus"),
    ],
)
def test_unusable_options_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        NativeRunner(
            PLAIN, case_weights("f32"), **{"num_blocks": 2, "block_size": 16, "max_model_len": CONTEXT, **options}
        )
    assert "\n" not in str(caught.value)


def test_a_pool_that_memory_does_not_hold() -> None:
    with pytest.raises(CacheError, match=r"the K/V pool takes [\d,]{15,} bytes, .*: lower kv_cache_memory") as caught:
        case_runner("f32", num_blocks=2**42)
    assert "\n" not in str(caught.value)


def damaged(weights: PackedWeights, name: str, values: np.ndarray) -> PackedWeights:
    return PackedWeights(matrices=weights.matrices, vectors={**weights.vectors, name: values})


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_logits_that_are_not_numbers_are_an_error(value: float) -> None:
    weights = damaged(random_weights(PLAIN, "f32"), "model.norm.weight", np.full(64, value, np.float32))
    runner = NativeRunner(PLAIN, weights, num_blocks=4, block_size=16, max_model_len=64)
    batch = make_batch([{"tokens": [5], "context": 0, "table": [0]}], block_size=16)
    with pytest.raises(PacelineError, match="logits are not numbers"):
        runner.forward(batch)
    with pytest.raises(PacelineError, match="logits are not numbers"):
        runner.forward(batch, greedy(1))
    without_rows = dataclasses.replace(batch, logit_rows=np.array([], dtype=np.int32))
    assert len(runner.forward(without_rows).logits) == 0


def test_what_breaks_an_invariant() -> None:
    runner = case_runner("f32")
    good = {"tokens": [5], "context": 0, "table": [0]}
    for request, options, message in (
        ({**good, "tokens": [PLAIN.vocab_size]}, {}, "token ids"),
        ({**good, "table": [48]}, {}, "slots"),
        (good, {"logit_rows": np.array([1], dtype=np.int32)}, "logit rows"),
        (good, {"hidden_layers": (5,)}, "layers"),
        (good, {"layers": (1, 0)}, "layers"),
        (good, {"layers": (3,)}, "layers"),
    ):
        with pytest.raises(ValueError, match=message):
            runner.forward(make_batch([request], block_size=16, **options))


def test_two_runners_live_side_by_side() -> None:
    """A target and its draft model share the process, not threads' work or scratch."""
    first, second = case_runner("int4", num_threads=3), case_runner("f32-everything", num_threads=2)
    alone = logits_of(case_runner("int4")), logits_of(case_runner("f32-everything"))
    for _ in range(3):
        assert_same_bits(logits_of(first), alone[0])
        assert_same_bits(logits_of(second), alone[1])


def test_a_request_may_have_no_tokens_in_a_pass():
    runner = case_runner(next(iter(CASES)))
    idle = {"tokens": TOKENS[:0], "context": 0, "table": range(12, 13)}
    assert_same_bits(logits_of(runner, [idle, WHOLE]), logits_of(runner))
