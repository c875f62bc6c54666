"""TorchRunner: K/V moves, refusals, sampling, and real models against transformers on real text."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from batches import BLOCK_SIZE, make_batch, random_tokens, run_in_chunks
from paceline.errors import CacheError, ConfigError, CorruptFileError, PacelineError
from paceline.models import torch_decoder
from paceline.models.loader import load
from paceline.models.torch_runner import TorchRunner, free_device_bytes, kv_bytes_per_block
from paceline.types import RowSampling
from transformers_peer import Peer, model_of_layers

TEXT = (
    "In cycling, riders in a paceline take turns at the front, so that the others spend less effort. "
    "def fibonacci(n):\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n    return a\n\n"
    "The town council met on Tuesday; 37 residents spoke, most of them against the new parking rules, "
    "and the vote was put off until 12 March. „Höflichkeit“ kostet nichts: 你好, мир!"
)


@pytest.fixture(scope="module")
def peer() -> Peer:
    return Peer("Llama", {})


def test_moved_path_continues_like_a_chain(peer: Peer) -> None:
    context, chain, table = random_tokens(6), random_tokens(3, seed=8), [5, 1, 7, 3]
    tree = np.concatenate([chain[:1], [50, 60], chain[1:2], [70], chain[2:]])  # the path is nodes 0, 3, 5
    ancestors = np.eye(6, dtype=bool)
    for node, parent in ((1, 0), (2, 0), (3, 0), (4, 1), (5, 3)):
        ancestors[node] |= ancestors[parent]
    drafted = {
        "tokens": tree, "context": 6, "table": table, "ancestors": ancestors, "depths": [0, 1, 1, 1, 2, 2],
    }  # fmt: skip
    peer.runner.forward(make_batch([{"tokens": context, "context": 0, "table": table}]))
    batch = make_batch([drafted])
    peer.runner.forward(batch)
    peer.runner.move(batch.slots[[3, 5]], batch.slots[[1, 2]])
    follow = {"tokens": [9], "context": 9, "table": table}
    ours = peer.runner.forward(make_batch([follow])).logits
    np.testing.assert_allclose(ours[0], peer.logits(np.concatenate([context, chain, [9]]))[-1], atol=1e-4)


def test_move_reads_all_sources_before_it_writes(peer: Peer) -> None:
    tokens = random_tokens(8)
    peer.runner.forward(make_batch([{"tokens": tokens, "context": 0, "table": [2, 3]}]))
    before = peer.runner._pool.clone()
    slots = np.arange(2 * BLOCK_SIZE, 4 * BLOCK_SIZE)
    order = np.array([3, 0, 1, 2, 7, 6, 5, 4])
    peer.runner.move(slots[order], slots)
    assert torch.equal(peer.runner._pool[:, slots], before[:, slots[order]])
    untouched = np.setdiff1d(np.arange(before.shape[1]), slots)
    assert torch.equal(peer.runner._pool[:, untouched], before[:, untouched])


def test_only_wanted_rows_get_logits(peer: Peer) -> None:
    tokens = random_tokens(9)
    request = {"tokens": tokens, "context": 0, "table": [0, 1, 2]}
    everything = peer.runner.forward(make_batch([request])).logits
    some = peer.runner.forward(make_batch([request], logit_rows=np.array([8, 2]))).logits
    np.testing.assert_allclose(some, everything[[8, 2]], atol=1e-5)
    none = peer.runner.forward(make_batch([request], logit_rows=np.array([], dtype=np.int32)))
    assert none.logits.shape == (0, peer.spec.vocab_size)


def test_sampled_rows_come_from_the_logits(peer: Peer) -> None:
    batch = make_batch([{"tokens": random_tokens(9), "context": 0, "table": [0, 1, 2]}], hidden_layers=("final",))
    logits = peer.runner.forward(batch).logits
    rows = len(logits)
    sampling = RowSampling(
        temperature=np.zeros(rows, np.float32), top_k=np.zeros(rows, np.int32), top_p=np.ones(rows, np.float32),
        min_p=np.zeros(rows, np.float32), seed=np.zeros(rows, np.uint64), stream=np.zeros(rows, np.uint32),
        position=np.arange(rows, dtype=np.uint32), purpose=np.zeros(rows, np.uint32),
    )  # fmt: skip
    output = peer.runner.forward(batch, sampling)
    np.testing.assert_array_equal(output.token_ids, logits.argmax(axis=1))
    assert output.logits is None
    assert output.hidden["final"].shape == (9, peer.spec.hidden_size)
    wanted = peer.runner.forward(batch, dataclasses.replace(sampling, want_logits=True))
    np.testing.assert_array_equal(wanted.logits, logits)  # the same pass again gives the same bits


def test_skipped_layers_hand_on_what_they_get() -> None:
    peer = Peer("Gemma3", {"head_dim": 16, "sliding_window": 6, "sliding_window_pattern": 2})
    spec, weights = model_of_layers(peer, [0, 3])
    smaller = TorchRunner(spec, weights, num_blocks=64, block_size=BLOCK_SIZE, max_model_len=64, num_threads=1)
    tokens = random_tokens(20)
    pool = peer.runner._pool
    peer.runner.forward(make_batch([{"tokens": tokens[:12], "context": 0, "table": range(5)}]))
    before = pool.clone()
    for chunk, context in ((tokens[:12], 0), (tokens[12:], 12)):
        request = {"tokens": chunk, "context": context, "table": range(5)}
        wanted = (1, 2, 3, "final")
        ours = peer.runner.forward(make_batch([request], layers=(0, 3), hidden_layers=wanted))
        theirs = smaller.forward(make_batch([request], hidden_layers=(1, "final")))
        np.testing.assert_array_equal(ours.logits, theirs.logits)
        for mine, other in ((1, 1), (2, 1), (3, 1), ("final", "final")):
            assert torch.equal(ours.hidden[mine], theirs.hidden[other])
    assert torch.equal(pool[[1, 2]], before[[1, 2]])
    assert not torch.equal(pool[[0, 3]], before[[0, 3]])
    for layers in ((3, 0), (0, 0), (4,)):
        with pytest.raises(AssertionError, match="layers"):
            peer.runner.forward(make_batch([{"tokens": [5], "context": 0, "table": [0]}], layers=layers))


def test_layout_and_limits(peer: Peer) -> None:
    runner = peer.runner
    assert runner.spec is peer.spec
    assert (runner.vocab_size, runner.max_model_len) == (97, 64)
    assert (runner.kv.num_blocks, runner.kv.block_size) == (64, BLOCK_SIZE)
    assert runner.kv.bytes_per_block * 64 == runner._pool.nbytes
    assert kv_bytes_per_block(peer.spec, block_size=16, dtype="bfloat16") == 2 * runner.kv.bytes_per_block


def test_bfloat16_stays_near_float32(peer: Peer) -> None:
    tokens = random_tokens(30)
    runner = TorchRunner(peer.spec, peer.weights, num_blocks=10, block_size=BLOCK_SIZE, dtype="bfloat16")
    exact = peer.logits(tokens)
    error = run_in_chunks(runner, tokens, list(range(10)), [20, 9, 1]) - exact
    assert 0 < np.abs(error).mean() < 0.05 * np.abs(exact).mean()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_model_len": 129}, "max_model_len must be at most the model's context of 128; got 129"),
        ({"dtype": "float16"}, "dtype must be one of float32, bfloat16; got 'float16'"),
        ({"device": "abacus"}, "device 'abacus' cannot be used"),
        ({"device": "privateuseone"}, "device 'privateuseone' cannot be used"),
        ({"num_threads": 10**20}, f"num_threads must be at most 1024; got {10**20}"),
        ({"device": "meta", "num_threads": 2}, "num_threads is read on a CPU only; device 'meta' would ignore it"),
    ],
)
def test_unusable_options_are_refused(peer: Peer, options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        TorchRunner(peer.spec, peer.weights, num_blocks=1, **options)
    assert "\n" not in str(caught.value)


def test_the_pool_limits_length_but_not_rope() -> None:
    options = {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10_000.0}}
    peer = Peer("Llama", options, max_model_len=400)
    small = TorchRunner(peer.spec, peer.weights, num_blocks=5, block_size=BLOCK_SIZE, max_model_len=400, num_threads=1)
    assert (peer.runner.max_model_len, small.max_model_len) == (256, 20)
    batch = make_batch([{"tokens": random_tokens(20), "context": 0, "table": range(5)}])
    np.testing.assert_array_equal(small.forward(batch).logits, peer.runner.forward(batch).logits)
    shorter = TorchRunner(peer.spec, peer.weights, num_blocks=5, block_size=BLOCK_SIZE, max_model_len=20, num_threads=1)
    assert not np.allclose(small.forward(batch).logits, shorter.forward(batch).logits, atol=0.05)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory is read from /proc")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_pool_takes_memory_as_it_is_written(peer: Peer, dtype: str) -> None:
    def resident_pages() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1])

    before = resident_pages()
    runner = TorchRunner(peer.spec, peer.weights, num_blocks=2**20, block_size=BLOCK_SIZE, dtype=dtype, num_threads=1)
    pages = runner._pool.nbytes // 4096
    assert resident_pages() - before < pages // 16
    batch = make_batch([{"tokens": random_tokens(6), "context": 0, "table": [2**20 - 1, 7]}])
    assert np.isfinite(runner.forward(batch).logits).all()


class _Failing(Mapping):
    """Weights that cannot be read."""

    def __init__(self, weights: Mapping, error: Exception) -> None:
        self._weights, self._error = weights, error

    def __getitem__(self, name: str) -> np.ndarray:
        raise self._error

    def __iter__(self):
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)

    def __contains__(self, name: object) -> bool:
        return name in self._weights


def test_out_of_memory_is_an_error_with_a_remedy(peer: Peer) -> None:
    with pytest.raises(CacheError, match=r"the K/V pool takes [\d,]{20,} bytes, .*: lower kv_cache_memory") as caught:
        TorchRunner(peer.spec, peer.weights, num_blocks=2**42, block_size=BLOCK_SIZE)
    assert "\n" not in str(caught.value)
    for error in (
        MemoryError("Unable to allocate 9 TiB"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 TiB."),
    ):
        with pytest.raises(CacheError, match=r"a copy of the weights in float32 takes [\d,]+ bytes, .*: try bfloat16"):
            TorchRunner(peer.spec, _Failing(peer.weights, error), num_blocks=4)
    with pytest.raises(RuntimeError, match="something else"):
        TorchRunner(peer.spec, _Failing(peer.weights, RuntimeError("something else")), num_blocks=4)


def test_free_memory_of_devices() -> None:
    assert free_device_bytes("cpu") is None
    with pytest.raises(ConfigError, match="device 'abacus' cannot be used"):
        free_device_bytes("abacus")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_free_memory_of_a_cuda_device() -> None:
    free = free_device_bytes("cuda")
    assert free is not None
    assert 0 < free <= torch.cuda.get_device_properties(0).total_memory


@pytest.mark.parametrize("name", torch_decoder._PACKING_OPERATIONS)
def test_a_torch_without_the_private_operations(peer: Peer, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def absent(operations: object, asked: str) -> object:
        if asked == name:
            raise AttributeError(asked)
        return getattr(real, asked)

    real = torch.ops.mkldnn
    operations = type("Operations", (), {"__getattr__": absent})()
    batch = make_batch([{"tokens": random_tokens(9), "context": 0, "table": [0, 1, 2]}])
    expected = peer.runner.forward(batch).logits
    monkeypatch.setattr(torch_decoder.torch.ops, "mkldnn", operations)
    runner = TorchRunner(peer.spec, peer.weights, num_blocks=4, block_size=BLOCK_SIZE, num_threads=1)
    np.testing.assert_allclose(runner.forward(batch).logits, expected, atol=1e-4)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda w: w.pop("model.layers.2.mlp.up_proj.weight"), "no tensor model.layers.2.mlp.up_proj.weight"),
        (lambda w: w.update({"model.norm.weight": np.ones(31, np.float32)}), r"must have shape \(32,\); got \(31,\)"),
        (lambda w: w.pop("lm_head.weight"), "no tensor lm_head.weight"),
    ],
)
def test_weights_that_do_not_fit_are_refused(peer: Peer, damage: Callable, message: str) -> None:
    weights = dict(peer.weights)
    damage(weights)
    with pytest.raises(CorruptFileError, match=message):
        TorchRunner(peer.spec, weights, num_blocks=1)


def test_nan_logits_are_an_error(peer: Peer) -> None:
    weights = {**peer.weights, "model.norm.weight": np.full(32, np.nan, np.float32)}
    runner = TorchRunner(peer.spec, weights, num_blocks=4, block_size=BLOCK_SIZE)
    batch = make_batch([{"tokens": [5], "context": 0, "table": [0]}])
    with pytest.raises(PacelineError, match="logits are not numbers"):
        runner.forward(batch)
    without_rows = dataclasses.replace(batch, logit_rows=np.array([], dtype=np.int32))
    assert len(runner.forward(without_rows).logits) == 0


def test_tokens_outside_the_vocabulary_break_an_invariant(peer: Peer) -> None:
    with pytest.raises(AssertionError, match="token ids"):
        peer.runner.forward(make_batch([{"tokens": [97], "context": 0, "table": [0]}]))


def _check_real_model(name: str, config: transformers.PreTrainedConfig, *, tolerance: float) -> None:
    """Prompt in chunks, then single steps and a batch beside it, against transformers on the same weights."""
    model = load(name, progress=False)
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(config).eval()
    shift = 1 if config.model_type.startswith("gemma") else 0
    state = {
        key: torch.from_numpy(value - shift if "norm" in key else np.array(value))
        for key, value in ((key, model.weights[key]) for key in model.weights)
        if key.startswith(("model.", "lm_head"))
    }
    theirs = theirs.to_empty(device="cpu")
    theirs.load_state_dict(state, strict=False, assign=True)
    theirs.tie_weights()
    theirs.model.rotary_emb = type(theirs.model.rotary_emb)(config)  # its buffers were on the meta device
    if hasattr(theirs.model.embed_tokens, "embed_scale"):
        theirs.model.embed_tokens.embed_scale = torch.tensor(theirs.model.embed_tokens.scalar_embed_scale)
    tokens = np.array(model.tokenizer.encode(TEXT), dtype=np.int32)
    assert len(tokens) > 90
    with torch.inference_mode():
        expected = theirs(torch.from_numpy(tokens)[None].long()).logits[0].float().numpy()
    del theirs, state
    runner = TorchRunner(model.spec, model.weights, num_blocks=40, max_model_len=512)
    table = np.random.default_rng(0).permutation(40)
    logits, done = [], 0
    for size in (50, 7, 1, 1, len(tokens) - 59):
        batch = make_batch([{"tokens": tokens[done : done + size], "context": done, "table": table}], block_size=16)
        logits.append(runner.forward(batch).logits)
        done += size
    ours = np.concatenate(logits)
    assert np.abs(ours - expected).max() < tolerance
    np.testing.assert_array_equal(ours.argmax(axis=1), expected.argmax(axis=1))


def _llama_like_config(name: str, kind: str, **options: object) -> transformers.PreTrainedConfig:
    spec = load(name, progress=False).spec
    rope = spec.ropes[-1]
    assert rope is not None
    return getattr(transformers, kind)(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        max_position_embeddings=spec.context_length,
        rms_norm_eps=spec.norm_eps,
        tie_word_embeddings=spec.tied_embeddings,
        **({"rope_parameters": {"rope_type": "default", "rope_theta": rope.theta}} | options),
    )


def test_smollm2_equals_transformers_on_real_text() -> None:
    _check_real_model("smollm2-135m", _llama_like_config("smollm2-135m", "LlamaConfig"), tolerance=2e-3)


@pytest.mark.slow
def test_qwen_coder_equals_transformers_on_real_text() -> None:
    name = "qwen2.5-coder-1.5b"
    _check_real_model(name, _llama_like_config(name, "Qwen2Config"), tolerance=5e-3)


@pytest.mark.slow
def test_gemma3_equals_transformers_on_real_text() -> None:
    name = "gemma3-270m"
    spec = load(name, progress=False).spec
    ropes = {
        f"{kind}_attention": {"rope_type": "default", "rope_theta": theta}
        for kind, theta in (("full", 1_000_000.0), ("sliding", 10_000.0))
    }
    config = _llama_like_config(
        name, "Gemma3TextConfig", head_dim=spec.head_dim, sliding_window=512, query_pre_attn_scalar=256,
        rope_parameters=ropes,
    )  # fmt: skip
    _check_real_model(name, config, tolerance=5e-3)
