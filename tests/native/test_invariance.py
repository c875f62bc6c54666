"""A row's bits depend on its own tokens alone: whatever is computed beside it, in whatever passes, chunks and trees, in
whatever blocks, by however many threads, it equals the row of plain decoding, in every weight format, K/V type and
instruction set."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batches import make_batch, random_tokens
from native_models import CASES, CONTEXT, assert_same_bits, case_runner, instruction_sets, plain_rows
from paceline.models.native_runner import NativeRunner
from paceline.types import ForwardOutput, RowSampling

in_small_doses = settings(derandomize=True, deadline=None, max_examples=10)
every_model = pytest.mark.parametrize("case", CASES)
every_kv_type = pytest.mark.parametrize("kv_cache_dtype", ["int16", "int8"])
block_sizes = st.sampled_from([1, 4, 8, 16, 32])
threads = st.sampled_from([1, 1, 2, 3])
isas = st.sampled_from(instruction_sets())
randoms = st.randoms(use_true_random=False)


def scattered_tables(count: int, block_size: int, rng: Random) -> list[list[int]]:
    """Block tables for `count` whole contexts, of blocks in random order."""
    blocks = list(range(4 * CONTEXT // block_size))
    rng.shuffle(blocks)
    size = len(blocks) // 4
    return [blocks[i * size : (i + 1) * size] for i in range(count)]


def draw_tokens(count: int, rng: Random) -> list[int]:
    return random_tokens(count, seed=rng.randrange(1000)).tolist()


@every_model
@every_kv_type
@settings(in_small_doses)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=4), block_sizes, threads, isas, randoms)
def test_passes_chunks_and_companions(
    case: str, kv_cache_dtype: str, lengths: list[int], block_size: int, num_threads: int, isa: str, rng: Random
) -> None:
    runner = case_runner(case, kv_cache_dtype=kv_cache_dtype, block_size=block_size, num_threads=num_threads, isa=isa)
    plain = plain_rows(case, kv_cache_dtype, isa)
    sequences = [draw_tokens(length, rng) for length in lengths]
    expected = [plain(tokens) for tokens in sequences]
    tables = scattered_tables(len(sequences), block_size, rng)
    done = [0] * len(sequences)
    while unfinished := [i for i, tokens in enumerate(sequences) if done[i] < len(tokens)]:
        chosen = rng.sample(unfinished, rng.randint(1, len(unfinished)))
        requests, rows = [], []
        for i in chosen:
            stop = min(len(sequences[i]), done[i] + rng.choice([1, 1, 2, 7, 8, 9, 30, 60]))
            requests.append({"tokens": sequences[i][done[i] : stop], "context": done[i], "table": tables[i]})
            rows.append(expected[i][done[i] : stop])
            done[i] = stop
        wanted = np.concatenate(rows)
        logit_rows = np.array(rng.sample(range(len(wanted)), rng.randint(1, len(wanted))), dtype=np.int32)
        logits = runner.forward(make_batch(requests, block_size=block_size, logit_rows=logit_rows)).logits
        assert_same_bits(logits, wanted[logit_rows])


class Tree:
    """A request with a context that is computed, pending tokens, and a random tree behind the last of them."""

    def __init__(self, table: list[int], rng: Random) -> None:
        self.table = table
        self.known = draw_tokens(rng.randint(0, 50), rng)
        pending, nodes = rng.choice([1, 1, 1, 2, 9]), rng.choice([0, 1, 3, 8, 16, 40])
        self.tokens = draw_tokens(pending + nodes, rng)
        self.parents = [*range(-1, pending - 1)]
        for node in range(pending, pending + nodes):
            self.parents.append(rng.randrange(max(pending - 1, node - rng.choice([1, 3, 40])), node))
        self.paths: list[list[int]] = []
        self.ancestors = np.eye(len(self.tokens), dtype=bool)
        for node, parent in enumerate(self.parents):
            self.paths.append([*(self.paths[parent] if parent >= 0 else []), node])
            self.ancestors[node, self.paths[node]] = True

    @property
    def request(self) -> dict:
        return {
            "tokens": self.tokens, "context": len(self.known), "table": self.table, "ancestors": self.ancestors,
            "depths": [len(path) - 1 for path in self.paths],
        }  # fmt: skip

    def text(self, node: int) -> list[int]:
        """The tokens that a node sees."""
        return [*self.known, *(self.tokens[i] for i in self.paths[node])]

    def accept(self, node: int, block_size: int) -> tuple[list[int], list[int]]:
        """Keeps the path to the node; returns (from, to), slots whose K/V must be moved for it."""
        keys = len(self.known) + np.array(self.paths[node])
        slots = [self.table[key // block_size] * block_size + key % block_size for key in keys]
        places = [
            self.table[key // block_size] * block_size + key % block_size
            for key in range(len(self.known), len(self.known) + len(keys))
        ]
        self.known = self.text(node)
        moved = [(src, dst) for src, dst in zip(slots, places, strict=True) if src != dst]
        return [src for src, _ in moved], [dst for _, dst in moved]


@every_model
@every_kv_type
@settings(in_small_doses)
@given(st.integers(1, 3), block_sizes, threads, isas, randoms)
def test_trees_and_what_follows_an_accepted_path(
    case: str, kv_cache_dtype: str, count: int, block_size: int, num_threads: int, isa: str, rng: Random
) -> None:
    runner = case_runner(case, kv_cache_dtype=kv_cache_dtype, block_size=block_size, num_threads=num_threads, isa=isa)
    plain = plain_rows(case, kv_cache_dtype, isa)
    trees = [Tree(table, rng) for table in scattered_tables(count, block_size, rng)]
    contexts = [{"tokens": tree.known, "context": 0, "table": tree.table} for tree in trees if tree.known]
    if contexts:
        runner.forward(make_batch(contexts, block_size=block_size))
    logits = runner.forward(make_batch([tree.request for tree in trees], block_size=block_size)).logits
    expected = [plain(tree.text(node))[-1] for tree in trees for node in range(len(tree.tokens))]
    assert_same_bits(logits, np.stack(expected))

    moves = [tree.accept(rng.randrange(len(tree.tokens)), block_size) for tree in trees]
    sources, targets = (np.array([slot for move in moves for slot in move[side]], dtype=np.int64) for side in (0, 1))
    runner.move(sources, targets)
    follows, expected = [], []
    for tree in trees:
        more = draw_tokens(rng.choice([1, 3, 20]), rng)
        follows.append({"tokens": more, "context": len(tree.known), "table": tree.table})
        expected.append(plain([*tree.known, *more])[len(tree.known) :])
    assert_same_bits(runner.forward(make_batch(follows, block_size=block_size)).logits, np.concatenate(expected))


@every_model
@every_kv_type
def test_one_long_pass(case: str, kv_cache_dtype: str) -> None:
    tokens = random_tokens(CONTEXT - 1)
    runner = case_runner(case, kv_cache_dtype=kv_cache_dtype, num_threads=3)
    logits = runner.forward(make_batch([{"tokens": tokens, "context": 0, "table": range(12)}], block_size=16)).logits
    assert_same_bits(logits, plain_rows(case, kv_cache_dtype)(tokens))


@pytest.mark.parametrize("case", ["f32-everything", "int4", "q4_k"])
def test_threads_split_outputs_only(case: str) -> None:
    tokens = random_tokens(50)
    batch = make_batch([{"tokens": tokens, "context": 0, "table": range(4)}], block_size=16, hidden_layers=(1, "final"))
    outputs = [case_runner(case, num_threads=threads).forward(batch) for threads in (1, 2, 3, 4, 7)]
    for other in outputs[1:]:
        assert_same_bits(other.logits, outputs[0].logits)
        for layer in (1, "final"):
            assert_same_bits(np.asarray(other.hidden[layer]), np.asarray(outputs[0].hidden[layer]))


@pytest.mark.parametrize("case", ["f32-everything", "int8", "q4_1"])
def test_hidden_states_and_skipped_layers(case: str) -> None:
    """A draft that skips layers, or reads them, sees what it would see token by token."""
    tokens, layers = random_tokens(45), (0, 2)
    wanted = (0, 1, 2, "final")
    whole, single = case_runner(case, num_threads=3), case_runner(case, block_size=4)

    def run(runner: NativeRunner, start: int, stop: int) -> ForwardOutput:
        request = {"tokens": tokens[start:stop], "context": start, "table": range(runner.kv.num_blocks)}
        return runner.forward(
            make_batch([request], block_size=runner.kv.block_size, hidden_layers=wanted, layers=layers)
        )

    outputs = [run(whole, 0, 30), run(whole, 30, 45)]
    plain = [run(single, i, i + 1) for i in range(45)]
    assert_same_bits(*(np.concatenate([output.logits for output in side]) for side in (outputs, plain)))
    for layer in wanted:
        assert_same_bits(*(np.concatenate([output.hidden[layer] for output in side]) for side in (outputs, plain)))


@pytest.mark.parametrize("case", ["f32", "q8_0"])
def test_log_probabilities_of_many_rows(case: str) -> None:
    """More rows than are held at once, in any order and more than once, beside a request without one."""
    runner = case_runner(case, num_threads=3)
    requests = [
        {"tokens": random_tokens(40), "context": 0, "table": range(12)},
        {"tokens": random_tokens(20, seed=4), "context": 0, "table": range(12, 24)},
        {"tokens": random_tokens(45, seed=5), "context": 0, "table": range(24, 36)},
    ]
    numbers = [*range(40), *range(60, 105)]
    rows = np.array([*numbers, *numbers[::-1]], dtype=np.int32)
    np.random.default_rng(0).shuffle(rows)

    def sample(chosen: np.ndarray) -> ForwardOutput:
        count = len(chosen)
        sampling = RowSampling(
            temperature=np.full(count, 0.8, np.float32), top_k=np.zeros(count, np.int32),
            top_p=np.full(count, 0.95, np.float32), min_p=np.zeros(count, np.float32),
            seed=chosen.astype(np.uint64), stream=np.zeros(count, np.uint32),
            position=chosen.astype(np.uint32), purpose=np.zeros(count, np.uint32), num_logprobs=3,
        )  # fmt: skip
        return runner.forward(make_batch(requests, block_size=16, logit_rows=chosen), sampling)

    together = sample(rows)
    for i in range(0, len(rows), 17):
        alone = sample(rows[i : i + 1])
        assert together.token_ids[i] == alone.token_ids[0]
        for name in ("token", "rank", "top_ids", "top"):
            np.testing.assert_array_equal(getattr(together.logprobs, name)[i], getattr(alone.logprobs, name)[0])
