"""Widths that fill no vector, group or block, vocabularies of one token, blocks of 1 to 64, more threads than work: a
pass in pieces and a tree give the bits of plain decoding there too."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest

from batches import make_batch
from native_models import EVERYTHING, PLAIN, PlainRows, assert_same_bits, instruction_sets, random_weights
from paceline.models.architecture import ModelSpec
from paceline.models.native_runner import NativeRunner
from paceline.models.rope import RopeSpec

CONTEXT = 96
FLOATS, BLOCKS, SUPER_BLOCKS = ("f32", "bf16", "i8", "q4_1"), ("Q4_0", "Q5_1", "Q8_0"), ("Q3_K", "Q4_K", "Q5_K", "Q6_K")


def odd_model(rng: Random) -> tuple[ModelSpec, str]:
    format_name = rng.choice(rng.choice([FLOATS, BLOCKS, SUPER_BLOCKS]))
    num_kv_heads, group = rng.choice([1, 2, 3]), rng.choice([1, 2, 3, 7, 9])
    head_dim, width = rng.choice([8, 12, 40, 80, 96, 256]), 1
    if format_name in BLOCKS:
        head_dim, width = rng.choice([32, 96]), 32
    elif format_name in SUPER_BLOCKS:
        head_dim, width = rng.choice([64, 128, 256]), 256
        num_kv_heads, group = rng.choice([1, 2]), 4
    layers = rng.choice([1, 2])
    ropes = [None, *(RopeSpec(theta=1e4, dim=dim) for dim in (head_dim, head_dim // 2))]
    spec = replace(
        rng.choice([PLAIN, EVERYTHING]),
        vocab_size=rng.choice([1, 7, 15, 17, 33, 300]),
        hidden_size=width * (rng.choice([1, 7, 33, 100]) if width == 1 else rng.choice([1, 2, 3])),
        intermediate_size=width * (rng.choice([1, 5, 17, 95]) if width == 1 else rng.choice([1, 2, 3])),
        num_layers=layers,
        num_heads=num_kv_heads * group,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        context_length=CONTEXT,
        ropes=tuple(rng.choice(ropes) for _ in range(layers)),
        windows=tuple(rng.choice([None, 1, 3, 16, 33]) for _ in range(layers)),
        attention_scale=head_dim**-0.5,
    )
    return spec, format_name


@pytest.mark.parametrize("seed", range(24))
def test_passes_and_trees(seed: int) -> None:
    rng = Random(seed)
    spec, format_name = odd_model(rng)
    weights = random_weights(spec, format_name)
    options = {"kv_cache_dtype": rng.choice(["int16", "int8"]), "isa": rng.choice(instruction_sets())}
    block_size = rng.choice([1, 2, 8, 16, 32, 64])
    runner = NativeRunner(
        spec,
        weights,
        num_blocks=2 * CONTEXT // block_size,
        block_size=block_size,
        num_threads=rng.randint(1, 8),
        **options,
    )
    plain = PlainRows(NativeRunner(spec, weights, num_blocks=CONTEXT // 16, num_threads=1, **options))
    table = rng.sample(range(runner.kv.num_blocks), runner.kv.num_blocks)
    tokens = [rng.randrange(spec.vocab_size) for _ in range(90)]

    known, stop = rng.choice([0, 1, 15, 30]), rng.choice([31, 32, 48])
    for start, end in ((0, known), (known, stop)):
        if start < end:
            request = {"tokens": tokens[start:end], "context": start, "table": table}
            logits = runner.forward(make_batch([request], block_size=block_size)).logits
            assert_same_bits(logits, plain(tokens[:end])[start:])

    nodes = rng.choice([1, 2, 17, 40])
    paths = [[0]]
    for node in range(1, nodes):
        paths.append([*paths[rng.randrange(max(0, node - rng.choice([1, 4, 40])), node)], node])
    ancestors = np.zeros((nodes, nodes), dtype=bool)
    for node, path in enumerate(paths):
        ancestors[node, path] = True
    request = {
        "tokens": tokens[stop : stop + nodes], "context": stop, "table": table, "ancestors": ancestors,
        "depths": [len(path) - 1 for path in paths],
    }  # fmt: skip
    checked = rng.sample(range(nodes), min(nodes, 6))
    logits = runner.forward(make_batch([request], block_size=block_size)).logits
    texts = [[*tokens[:stop], *(tokens[stop + i] for i in paths[node])] for node in checked]
    assert_same_bits(logits[checked], np.stack([plain(text)[-1] for text in texts]))
