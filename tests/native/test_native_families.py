"""The native engine against the torch engine, in float32 weights: every family, passes over some layers, hidden states.

K and V are rounded to the cache's type in both, so that what is left is rounding of float32.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from batches import BLOCK_SIZE, make_batch, random_tokens, run_in_chunks
from native_models import packed_floats
from paceline.models.native_runner import NativeRunner
from paceline.models.torch_decoder import Layer, TorchDecoder
from transformers_peer import FAMILIES, Peer, model_of_layers

TOLERANCE = 0.01  # some values of the K/V are rounded the other way
TABLE = [9, 3, 30, 4, 5, 21, 22, 60, 1, 0]


class RoundedKV(TorchDecoder):
    """Rounds queries, K and V as the native engine does before anything reads them."""

    kv_cache_dtype = "int16"

    def _project(self, layer: Layer, h: torch.Tensor, turns: torch.Tensor | None) -> torch.Tensor:
        qkv = super()._project(layer, h, turns)
        heads = qkv.view(len(qkv), -1, self._spec.head_dim)
        int16, values = self.kv_cache_dtype == "int16", heads.shape[1] - self._spec.num_kv_heads
        scale = heads.abs().amax(-1, keepdim=True) / (4095 if int16 else 127)
        by_norm = values if int16 else self._spec.num_heads
        scale[:, :by_norm] = heads[:, :by_norm].norm(dim=-1, keepdim=True) / 32767
        heads.copy_((heads / scale).round() * scale)
        return qkv


class RoundedInt8KV(RoundedKV):
    kv_cache_dtype = "int8"


@pytest.fixture(scope="module", params=FAMILIES, ids=str)
def peer(request: pytest.FixtureRequest) -> Peer:
    peer = Peer(*FAMILIES[request.param])
    peer.runner._decoder.__class__ = RoundedKV
    return peer


def native(peer: Peer, **options) -> NativeRunner:
    return NativeRunner(
        peer.spec,
        packed_floats(peer.weights),
        **{
            "num_blocks": 64, "block_size": BLOCK_SIZE, "max_model_len": min(64, peer.spec.context_length),
            "num_threads": 1, **options,
        },
    )  # fmt: skip


def assert_close(ours: np.ndarray, theirs: np.ndarray, *, atol: float = TOLERANCE) -> None:
    assert np.abs(theirs).max() > 0.1
    np.testing.assert_allclose(ours, theirs, atol=atol, rtol=0)


def test_chunks_equal_the_torch_engine(peer: Peer) -> None:
    tokens, sizes = random_tokens(40), [17, 1, 19, 3]
    ours = run_in_chunks(native(peer), tokens, TABLE, sizes)
    theirs = run_in_chunks(peer.runner, tokens, TABLE, sizes)
    assert_close(ours, theirs)
    assert np.abs(ours - theirs).mean() < 1e-3
    assert_close(ours, peer.logits(tokens), atol=0.05)  # K/V in float32


def test_trees_beside_other_requests_equal_the_torch_engine(peer: Peer) -> None:
    parents = [-1, 0, 0, 1, 1, 2, 4]
    ancestors, depths = np.eye(len(parents), dtype=bool), [0] * len(parents)
    for node, parent in enumerate(parents[1:], start=1):
        ancestors[node] |= ancestors[parent]
        depths[node] = depths[parent] + 1
    context = {"tokens": random_tokens(15), "context": 0, "table": TABLE}
    drafted = {
        "tokens": random_tokens(7, seed=5),
        "context": 15,
        "table": TABLE,
        "ancestors": ancestors,
        "depths": depths,
    }
    other = {"tokens": random_tokens(11, seed=6), "context": 0, "table": [40, 41, 42]}
    ours, theirs = native(peer), peer.runner
    for runner in (ours, theirs):
        runner.forward(make_batch([context]))
    batch = make_batch([other, drafted])
    assert_close(ours.forward(batch).logits, theirs.forward(batch).logits)


def test_int8_keys_and_values() -> None:
    peer = Peer(*FAMILIES["gemma3"])
    peer.runner._decoder.__class__ = RoundedInt8KV
    tokens = random_tokens(40)
    ours = run_in_chunks(native(peer, kv_cache_dtype="int8"), tokens, TABLE, [30, 10])
    theirs = run_in_chunks(peer.runner, tokens, TABLE, [30, 10])
    assert_close(ours, theirs, atol=0.05)  # where a value lies between two of 255, rounding may choose either
    assert np.abs(ours - theirs).mean() < 2e-3


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3"])
def test_hidden_states_equal_the_torch_engine(name: str) -> None:
    peer = Peer(*FAMILIES[name])
    peer.runner._decoder.__class__ = RoundedKV
    wanted = (0, 1, 3, peer.spec.num_layers, "final")
    request = {"tokens": random_tokens(20), "context": 0, "table": TABLE}
    batch = make_batch([request], logit_rows=np.array([19], dtype=np.int32), hidden_layers=wanted)
    ours, theirs = native(peer).forward(batch), peer.runner.forward(batch)
    assert set(ours.hidden) == set(wanted)
    for layer in wanted:
        assert_close(np.asarray(ours.hidden[layer]), np.asarray(theirs.hidden[layer]))
    assert_close(ours.logits, theirs.logits)


def test_skipped_layers_hand_on_what_they_get() -> None:
    """A pass over layers 0 and 3 is one of the model that has only these."""
    peer = Peer("Gemma3", {"head_dim": 16, "sliding_window": 6, "sliding_window_pattern": 2})
    spec, weights = model_of_layers(peer, [0, 3])
    runner = native(peer)
    smaller = NativeRunner(
        spec, packed_floats(weights), num_blocks=64, block_size=BLOCK_SIZE, max_model_len=64, num_threads=1
    )
    tokens = random_tokens(20)
    for chunk, context in ((tokens[:12], 0), (tokens[12:], 12)):
        request = {"tokens": chunk, "context": context, "table": TABLE}
        ours = runner.forward(make_batch([request], layers=(0, 3), hidden_layers=(1, 2, 3, "final")))
        theirs = smaller.forward(make_batch([request], hidden_layers=(1, "final")))
        np.testing.assert_array_equal(ours.logits, theirs.logits)
        for mine, other in ((1, 1), (2, 1), (3, 1), ("final", "final")):
            np.testing.assert_array_equal(np.asarray(ours.hidden[mine]), np.asarray(theirs.hidden[other]))


def test_skipped_layers_keep_their_keys_and_values() -> None:
    """Layer 0 alone, over tokens that are computed, writes what is there already; the rest must have stayed."""
    runner = native(Peer("Llama", {}))
    tokens = random_tokens(20)
    prompt = {"tokens": tokens[:12], "context": 0, "table": TABLE}
    after = {"tokens": tokens[12:], "context": 12, "table": TABLE}
    runner.forward(make_batch([prompt]))
    expected = runner.forward(make_batch([after])).logits
    runner.forward(make_batch([prompt], layers=(0,)))
    np.testing.assert_array_equal(runner.forward(make_batch([after])).logits, expected)


def test_dynamic_rope_is_fixed_by_the_maximum_length() -> None:
    options = {
        "max_position_embeddings": 16,
        "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10_000.0},
    }
    peer = Peer("Llama", options, max_model_len=48)
    peer.runner._decoder.__class__ = RoundedKV
    tokens = random_tokens(40)
    ours = run_in_chunks(native(peer, max_model_len=48), tokens, TABLE, [30, 10])
    assert_close(ours, run_in_chunks(peer.runner, tokens, TABLE, [30, 10]))
