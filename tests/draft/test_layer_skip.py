"""LayerSkipDrafter against the target's own layers, run by hand; ToyModel notices every mistake in the cache."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from batches import make_batch
from native_models import CASES, case_runner
from paceline import LLM, CacheConfig, EngineConfig, SamplingParams
from paceline.draft.layer_skip import LayerSkipDrafter, check_layers, default_layers
from paceline.draft.prediction import PredictionDrafter
from paceline.errors import ConfigError
from paceline.interfaces import Runner
from paceline.models.tuned_layers import TunedLayers, write_tuned
from paceline.sampling.noise import DRAFT, PhiloxNoise
from paceline.sampling.race import race
from paceline.testing import ToyModel
from paceline.types import RequestView
from toy_engine import PROMPT, TOKENIZER, make_engine, run

TEXT = [3, 1, 4, 1, 5, 9, 2, 6]
TABLE = [2, 0, 3, 1]


def view(token_ids, *, request_id="r", table=TABLE, prompt_length=4, seed=11, stream=0, **params) -> RequestView:
    ids, blocks = np.array(token_ids, dtype=np.int32), np.array(table, dtype=np.int32)
    params = SamplingParams(**params)
    return RequestView(request_id, ids, prompt_length, params, seed, stream, 0, len(ids) - 1, blocks)


def drafter(runner: Runner, layers=(0,), **options) -> LayerSkipDrafter:
    return LayerSkipDrafter(runner, layers=layers, **{"rule_needs_law": False, **options})


def compute(runner: Runner, token_ids, *, context=0, table=TABLE, layers=None) -> np.ndarray:
    """Logits [V] after the last token; its K/V and the others' stay in the pool."""
    request = {"tokens": token_ids, "context": context, "table": table}
    logits = runner.forward(make_batch([request], block_size=runner.kv.block_size, layers=layers)).logits
    assert logits is not None
    return logits[-1]


def continuation(runner: Runner, token_ids, count: int, *, layers) -> list[int]:
    """What the layers write greedily after the exact K/V of all known tokens but the last."""
    text = list(token_ids)
    compute(runner, text[:-1])
    for _ in range(count):
        text.append(int(compute(runner, text[-1:], context=len(text) - 1, layers=layers).argmax()))
    return text[len(token_ids) :]


@pytest.mark.parametrize("layers", [(0,), (0, 2), (1,)])
def test_drafts_are_what_the_layers_write_after_the_targets_own_keys(layers: tuple[int, ...]) -> None:
    runner = case_runner("q8_0", block_size=4)
    expected = continuation(runner, TEXT, 5, layers=layers)
    compute(runner, TEXT[:-1])
    (draft,) = drafter(runner, layers).propose([view(TEXT)], [5])
    assert draft is not None
    assert draft.token_ids.tolist() == expected
    assert draft.is_chain


def test_all_layers_are_the_target_and_some_are_not() -> None:
    """Otherwise the test above would say little."""
    spec, _ = CASES["q8_0"]
    runner = case_runner("q8_0", block_size=4)
    full = continuation(runner, TEXT, 5, layers=None)
    assert continuation(runner, TEXT, 5, layers=tuple(range(spec.num_layers))) == full
    assert continuation(runner, TEXT, 5, layers=(0, 2)) != full


def test_shared_noise_draws_what_the_target_would_draw() -> None:
    model = ToyModel(vocab_size=12, num_blocks=8, block_size=4)
    compute(model, TEXT[:-1])
    (draft,) = drafter(model).propose([view(TEXT, temperature=0.9, stream=3)], [4])
    assert draft is not None
    text = list(TEXT)
    for token in draft.token_ids.tolist():
        logits = compute(ToyModel(vocab_size=12, num_blocks=8, block_size=4), text) / np.float32(0.9)
        uniforms = PhiloxNoise(11, 3).uniforms(position=len(text), purpose=0, attempt=0, vocab_size=12)
        assert token == int(race(np.exp(logits - logits.max()), uniforms))
        text.append(token)


def test_laws_are_what_the_tokens_were_drawn_from_with_words_of_their_own() -> None:
    model = ToyModel(vocab_size=12, num_blocks=8, block_size=4, skip_drift=1.0)
    compute(model, TEXT[:-1])
    (draft,) = drafter(model, rule_needs_law=True).propose([view(TEXT, temperature=0.9)], [3])
    assert draft is not None
    assert draft.law is not None
    text = list(TEXT)
    for node, token in enumerate(draft.token_ids.tolist()):
        logits = compute(model, text[-1:], context=len(text) - 1, layers=(0,)).astype(np.float64) / 0.9
        expected = np.exp(logits - logits.max())
        expected /= expected.sum()
        np.testing.assert_allclose(draft.law.probs[node], expected, rtol=1e-6)
        uniforms = PhiloxNoise(11).uniforms(position=len(text), purpose=DRAFT, attempt=0, vocab_size=12)
        assert token == int(race(expected, uniforms))
        text.append(token)


def test_requests_draft_the_same_alone_and_in_company() -> None:
    model = ToyModel(vocab_size=12, num_blocks=16, block_size=4)
    views, budgets = [], [1, 5, 3]
    for k in range(3):
        table = [k, k + 4, k + 8, k + 12]
        compute(model, TEXT[: 7 - k], table=table)
        views.append(view(TEXT[: 8 - k], request_id=str(k), table=table, temperature=0.7, top_k=5, stream=k))
    together = drafter(model).propose(views, budgets)
    assert [None if draft is None else len(draft) for draft in together] == budgets
    for own, budget, draft in zip(views, budgets, together, strict=True):
        (alone,) = drafter(model).propose([own], [budget])
        assert alone is not None
        assert draft is not None
        assert alone.token_ids.tolist() == draft.token_ids.tolist()


def test_penalties_masks_and_min_tokens_are_those_of_the_request() -> None:
    """Whatever changes the target's choice changes the draft's: without drift every token is accepted."""
    each = [
        SamplingParams(temperature=t, seed=5, n=2, max_tokens=20, ignore_eos=True, **options)
        for t in (0.0, 0.8)
        for options in (
            {"repetition_penalty": 1.3, "frequency_penalty": 0.6, "presence_penalty": 0.4},
            {"allowed_token_ids": (2, 3, 4, 5), "logit_bias": {3: 4.0}},
            {"min_tokens": 15, "stop_token_ids": (4, 7, 9), "banned_token_ids": (6,)},
        )
    ]
    runner = ToyModel(vocab_size=TOKENIZER.vocab_size, seed=3, num_blocks=200, block_size=4, max_model_len=128)
    engine = make_engine(drafter=drafter(runner, eos_ids=TOKENIZER.eos_ids), runner=runner)
    for output in run(engine, [PROMPT] * len(each), each):
        assert {origin for choice in output.outputs for origin in choice.origins} <= {"plain", "accepted", "bonus"}
        assert output.metrics.num_accepted_tokens > 0


def test_a_pass_that_fails_in_the_middle_of_a_draft_leaves_nothing_in_the_cache() -> None:
    """Its keys lack layers: they must neither be found by a prefix nor be read when the request goes on."""

    class Failing(ToyModel):
        passes = 0

        def forward(self, batch, sampling=None):
            output = super().forward(batch, sampling)
            self.passes += batch.layers is not None
            if batch.layers is not None and self.passes in (3, 9, 10, 18):
                raise MemoryError
            return output

    params = SamplingParams(max_tokens=24, ignore_eos=True)
    plain = list(run(make_engine(prefix_caching=False), [PROMPT], params)[0].token_ids)
    runner = Failing(vocab_size=TOKENIZER.vocab_size, seed=3, order=3, num_blocks=64, block_size=4, max_model_len=128)
    engine = make_engine(drafter=drafter(runner), runner=runner)
    engine.add_request(PROMPT, params)
    num_failures, outputs = 0, []
    while engine.has_unfinished:
        try:
            outputs += [delta.output for delta in engine.step() if delta.output is not None]
        except MemoryError:
            num_failures += 1
            engine.add_request([*PROMPT, *plain[: 4 * num_failures]], params)
        engine.check_integrity()
    assert num_failures == 4
    for output in outputs:
        text = [*output.prompt_token_ids, *output.token_ids]
        assert text[: len(PROMPT) + 24] == PROMPT + plain


def test_released_requests_are_forgotten() -> None:
    runner = ToyModel(vocab_size=TOKENIZER.vocab_size, seed=3, num_blocks=64, block_size=4, max_model_len=128)
    subject = drafter(runner)
    run(
        make_engine(drafter=subject, runner=runner),
        [PROMPT, PROMPT[:5]],
        SamplingParams(max_tokens=9, n=2, temperature=1.0),
    )
    assert not subject._states


@pytest.mark.parametrize(
    ("num_layers", "kept"),
    [(2, (0,)), (3, (0, 2)), (4, (0, 2, 3)), (8, (0, 1, 4, 5, 6, 7)), (30, (*range(10), *range(20, 30)))],
)
def test_default_layers_keep_both_ends(num_layers: int, kept: tuple[int, ...]) -> None:
    layers = default_layers(num_layers)
    assert layers == kept
    check_layers(layers, num_layers=num_layers)


@pytest.mark.parametrize(
    ("layers", "message"), [((0, 4), "from 0 to 3, which are the target's; got 4"), (range(4), "keeps all 4")]
)
def test_layers_that_the_target_lacks_or_keeps_are_refused(layers, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_layers(layers, num_layers=4)


@pytest.mark.parametrize("engine", ["native", "torch"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_ids_are_those_of_plain_decoding(tiny_llama: Path, engine, temperature: float) -> None:
    """Choices share prompts, prompts share prefixes, and a K/V cache that is too small for all preempts."""
    cache = CacheConfig(kv_cache_memory=9 * 4096)
    config = EngineConfig(engine=engine, num_threads=1, max_model_len=64, cache=cache)
    params = SamplingParams(temperature=temperature, seed=3, n=2, max_tokens=30, ignore_eos=True)
    prompts = ["the same beginning", "the same beginning of another", "something else"]
    plain = LLM(tiny_llama, config=config).generate(prompts, params)
    llm = LLM(tiny_llama, config=config, speculation={"method": "layer_skip", "layers": [0]})
    for _ in range(2):  # the second time prompts come from the prefix cache
        outputs = llm.generate(prompts, params)
        for output, expected in zip(outputs, plain, strict=True):
            assert [c.token_ids for c in output.outputs] == [c.token_ids for c in expected.outputs]
            assert output.metrics.num_draft_tokens > 0
    assert any(output.num_cached_tokens for output in outputs)
    assert llm.engine.scheduler.num_preemptions > 0


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_rules_on_laws_keep_greedy_ids(tiny_llama: Path, rule: str) -> None:
    config = EngineConfig(num_threads=1, cache=CacheConfig(kv_cache_memory=1 << 20))
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    [plain] = LLM(tiny_llama, config=config).generate("ab ab", params)
    llm = LLM(tiny_llama, config=config, speculation={"method": "layer_skip", "layers": [0], "verification": rule})
    [output] = llm.generate("ab ab", params)
    assert output.token_ids == plain.token_ids
    assert output.lossless


def test_layers_are_the_tuned_ones_or_else_the_default(tiny_llama: Path, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    config = EngineConfig(num_threads=1, cache=CacheConfig(kv_cache_memory=1 << 20))

    def layers(**options) -> tuple[int, ...]:
        drafter = LLM(tiny_llama, config=config, speculation={"method": "layer_skip", **options}).engine.drafter
        assert isinstance(drafter, PredictionDrafter)
        subject = drafter.drafter
        assert isinstance(subject, LayerSkipDrafter)
        return subject.layers

    assert layers() == default_layers(2)
    write_tuned(tiny_llama, TunedLayers("tiny", (1,), 2, 0.5, 1.1, 100))
    assert layers() == (1,)
    assert layers(layers=[0]) == (0,)
    with pytest.raises(ConfigError, match="from 0 to 1"):
        layers(layers=[0, 2])
