"""Each decoder family against transformers' logits on tiny random models, in float32.

One pass over the prompt, chunks, single steps, several requests in scattered blocks, and draft trees.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from batches import make_batch, random_tokens, run_in_chunks
from transformers_peer import FAMILIES, Peer, longrope

TOLERANCE = 1e-4


@pytest.fixture(scope="module", params=FAMILIES, ids=str)
def peer(request: pytest.FixtureRequest) -> Peer:
    return Peer(*FAMILIES[request.param])


def assert_close(ours: np.ndarray, theirs: np.ndarray) -> None:
    assert np.abs(theirs).max() > 0.1
    np.testing.assert_allclose(ours, theirs, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    "sizes",
    [[40], [17, 20, 3], [1] * 10 + [30], [24] + [1] * 16, [5, 6, 7, 8, 14]],
    ids=["one pass", "chunks", "steps first", "steps last", "few"],
)
@pytest.mark.parametrize("scattered", [False, True], ids=["consecutive", "scattered"])
def test_logits_equal_transformers(peer: Peer, sizes: list[int], scattered: bool) -> None:
    tokens = random_tokens(40)
    table = [9, 3, 30, 4, 5, 21, 22, 60, 1, 0] if scattered else list(range(20, 30))
    assert_close(run_in_chunks(peer.runner, tokens, table, sizes), peer.logits(tokens))


def test_packed_requests_equal_transformers(peer: Peer) -> None:
    lengths, contexts = [31, 9, 40, 12, 24], [30, 7, 20, 0, 19]  # of one token, few and many, with and without context
    tables = [
        list(range(8)),
        [50, 40, 30],
        [55, 12, 33, 44, 11, 22, 63, 62, 61, 60],
        [24, 25, 26],
        [9, 13, 10, 59, 17, 8],
    ]
    prompts = [random_tokens(n, seed=i) for i, n in enumerate(lengths)]
    before = [
        {"tokens": p[:c], "context": 0, "table": t} for p, c, t in zip(prompts, contexts, tables, strict=True) if c
    ]
    peer.runner.forward(make_batch(before))
    requests = [{"tokens": p[c:], "context": c, "table": t} for p, c, t in zip(prompts, contexts, tables, strict=True)]
    ours = peer.runner.forward(make_batch(requests)).logits
    theirs = np.concatenate([peer.logits(p)[c:] for p, c in zip(prompts, contexts, strict=True)])
    assert_close(ours, theirs)


TREES = {
    "few": [-1, 0, 0, 1, 1, 2, 4],  # parents of own tokens; 0 is the root
    "many": [-1, 0, 0, 0, *[1 + i % 3 for i in range(8)], *[4 + i % 8 for i in range(10)]],
}


@pytest.mark.parametrize(
    "table", [[2, 3, 4, 5, 6, 7, 8, 9, 10, 11], [31, 7, 2, 19, 18, 40, 41, 42, 0, 62]], ids=["view", "gather"]
)
@pytest.mark.parametrize("tree", TREES, ids=str)
def test_each_path_of_a_tree_equals_a_chain(peer: Peer, tree: str, table: list[int]) -> None:
    parents = TREES[tree]
    context = random_tokens(15)
    nodes = random_tokens(len(parents), seed=5)
    paths = [[i] if p < 0 else [] for i, p in enumerate(parents)]
    ancestors = np.eye(len(parents), dtype=bool)
    for i, p in enumerate(parents[1:], start=1):
        paths[i] = [*paths[p], i]
        ancestors[i] |= ancestors[p]
    peer.runner.forward(make_batch([{"tokens": context, "context": 0, "table": table}]))
    drafted = {
        "tokens": nodes, "context": 15, "table": table, "ancestors": ancestors,
        "depths": [len(path) - 1 for path in paths],
    }  # fmt: skip
    ours = peer.runner.forward(make_batch([drafted])).logits
    theirs = np.stack([peer.logits(np.concatenate([context, nodes[path]]))[-1] for path in paths])
    assert_close(ours, theirs)


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3"])
def test_hidden_states_equal_transformers(name: str) -> None:
    peer = Peer(*FAMILIES[name])
    tokens = random_tokens(20)
    with torch.no_grad():
        theirs = peer.model(torch.from_numpy(tokens)[None].long(), output_hidden_states=True).hidden_states
    wanted = (0, 1, 3, peer.spec.num_layers, "final")
    batch = make_batch(
        [{"tokens": tokens, "context": 0, "table": range(5)}], logit_rows=np.array([19]), hidden_layers=wanted
    )
    output = peer.runner.forward(batch)
    assert set(output.hidden) == set(wanted)
    for layer in (0, 1, 3):
        assert_close(np.asarray(output.hidden[layer]), theirs[layer][0].numpy())
    assert_close(np.asarray(output.hidden["final"]), theirs[-1][0].numpy())  # transformers norms the last one
    with torch.no_grad():
        last = peer.model.model.norm(output.hidden[peer.spec.num_layers].clone())
    assert_close(last.numpy(), theirs[-1][0].numpy())
    assert output.logits.shape == (1, peer.spec.vocab_size)


def test_dynamic_scaling_is_fixed_by_the_maximum_length() -> None:
    """A deliberate difference: transformers looks at the longest position of a pass, we at what the engine may reach.

    So transformers is made to see the maximum length first, after which it keeps those frequencies for shorter ones
    as long as they exceed the trained context.
    """
    options = {
        "max_position_embeddings": 16,
        "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10_000.0},
    }
    peer = Peer("Llama", options, max_model_len=48)
    peer.logits(random_tokens(48))
    tokens = random_tokens(40)
    assert_close(run_in_chunks(peer.runner, tokens, list(range(10)), [30, 10]), peer.logits(tokens))
    assert not np.allclose(Peer("Llama", options, max_model_len=16).runner.forward(
        make_batch([{"tokens": tokens[:16], "context": 0, "table": range(4)}])
    ).logits, peer.logits(tokens)[:16], atol=0.05)  # fmt: skip


def test_longrope_takes_the_long_factors_when_the_engine_may_pass_the_original_context() -> None:
    """A deliberate difference: short passes of such an engine use the long factors too."""
    options = {
        "original_max_position_embeddings": 32,
        "rope_parameters": {**longrope(8), "original_max_position_embeddings": 32, "partial_rotary_factor": 1.0},
    }
    peer = Peer("Phi3", options, max_model_len=64)
    tokens = random_tokens(40)  # past the original context, where transformers takes them as well
    theirs = peer.logits(tokens)
    assert_close(run_in_chunks(peer.runner, tokens, list(range(10)), [10, 29, 1]), theirs)
    short = peer.runner.forward(make_batch([{"tokens": tokens[:10], "context": 0, "table": range(3)}])).logits
    assert_close(short, theirs[:10])


def test_long_contexts_beside_short_ones() -> None:
    """Long contexts in consecutive blocks are read in place, others are gathered with requests of about their size."""
    peer = Peer("Llama", {"max_position_embeddings": 2048}, num_blocks=700, max_model_len=2048)
    tables = [np.arange(290), 690 - 2 * np.arange(200), np.array([301, 305, 303, 307]), np.arange(692, 696)]
    lengths = [1150, 790, 13, 14]
    prompts = [random_tokens(n, seed=i) for i, n in enumerate(lengths)]
    for prompt, table in zip(prompts, tables, strict=True):
        peer.runner.forward(make_batch([{"tokens": prompt[:-3], "context": 0, "table": table}]))
    requests = [
        {"tokens": prompt[-3:], "context": len(prompt) - 3, "table": table}
        for prompt, table in zip(prompts, tables, strict=True)
    ]
    ours = peer.runner.forward(make_batch(requests)).logits
    assert_close(ours, np.concatenate([peer.logits(prompt)[-3:] for prompt in prompts]))
