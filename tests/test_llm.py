"""LLM on the real SmolLM2, with both engines: speculation leaves ids alone, in batches and streams."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from paceline import LLM, CacheConfig, EngineConfig, SamplingParams
from paceline.errors import CacheError, ConfigError, DraftMismatchError, PromptError
from paceline.models.runners import native_available
from paceline.types import RequestOutput
from tiny_llama import write_tiny_llama

TIE = 1e-3  # log gap under which rounding may decide on the torch engine
MAX_TOKENS = 24


@pytest.fixture(scope="module")
def prompts() -> list[list[dict]]:
    lines = (Path(__file__).parent / "data" / "prompts.jsonl").read_text().splitlines()
    return [[{"role": "user", "content": json.loads(line)["turns"][0]}] for line in lines]


def config(engine: str = "auto") -> EngineConfig:
    threads = 1 if engine == "native" else None  # a pass is a hundred short stages: on a busy machine threads wait long
    return EngineConfig(
        engine=engine, num_threads=threads, cache=CacheConfig(kv_cache_memory=256 << 20, prefix_caching=False)
    )


@pytest.fixture(scope="module", params=["torch", "native"] if native_available() else ["torch"])
def engine(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def llm(smollm2, engine: str) -> LLM:
    return LLM(smollm2, config=config(engine), speculation={"method": "ngram", "min_ngram": 1})


@pytest.fixture(scope="module")
def self_drafting(smollm2, engine: str) -> LLM:
    return LLM(smollm2, config=config(engine), speculation={"method": "draft_model", "model": "smollm2-135m"})


def assert_same(llm: LLM, plain: RequestOutput, other: RequestOutput, params: SamplingParams) -> None:
    """Equal ids; on the torch engine the first difference may be a floating-point tie."""
    if plain.token_ids == other.token_ids:
        return
    assert llm.config.engine == "torch"
    at = next(i for i, (a, b) in enumerate(zip(plain.token_ids, other.token_ids, strict=False)) if a != b)
    known = [*plain.prompt_token_ids, *plain.token_ids[:at]]
    margin = llm.race_margin(known, params, prompt_length=len(plain.prompt_token_ids), seed=plain.seed)
    assert margin < TIE, f"differs at {at} with a margin of {margin:.2e}"


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_prompt_lookup_and_batches_leave_the_ids_alone(llm: LLM, prompts: list, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, seed=7, max_tokens=MAX_TOKENS)
    plain_params = SamplingParams(temperature=temperature, seed=7, max_tokens=MAX_TOKENS, speculation=False)
    alone = [llm.chat(messages, plain_params)[0] for messages in prompts]
    batch = llm.chat(prompts, params)
    for plain, speculative in zip(alone, batch, strict=True):
        assert_same(llm, plain, speculative, params)
        assert plain.metrics.num_drafts == 0
    assert sum(output.metrics.num_accepted_tokens for output in batch) > 0


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_model_that_drafts_for_itself_is_always_right(self_drafting: LLM, prompts: list, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, seed=7, max_tokens=MAX_TOKENS)
    plain_params = SamplingParams(temperature=temperature, seed=7, max_tokens=MAX_TOKENS, speculation=False)
    plain = self_drafting.chat(prompts[:3], plain_params)
    speculative = self_drafting.chat(prompts[:3], params)
    for one, other in zip(plain, speculative, strict=True):
        assert_same(self_drafting, one, other, params)
        assert "recovered" not in other.outputs[0].origins


def test_a_stream_is_the_answer_in_pieces(llm: LLM, prompts: list) -> None:
    params = SamplingParams(max_tokens=MAX_TOKENS)
    deltas = list(llm.stream(prompts[6], params))
    output = deltas[-1].output
    assert output is not None
    assert output.finished
    assert "".join(delta.text for delta in deltas) == output.text
    assert tuple(t for delta in deltas for t in delta.token_ids) == output.token_ids
    assert tuple(o for delta in deltas for o in delta.origins) == output.outputs[0].origins
    assert output.text == llm.chat(prompts[6], params)[0].text


def test_closing_a_stream_cancels_the_request(llm: LLM, prompts: list) -> None:
    stream = llm.stream(prompts[0], SamplingParams(max_tokens=200))
    next(stream)
    stream.close()
    assert not llm.engine.has_unfinished
    assert llm.engine.cache.num_free_blocks == llm.engine.cache.num_blocks


def test_choices_differ_and_share_their_prompt(llm: LLM, prompts: list) -> None:
    params = SamplingParams(temperature=1.0, seed=3, n=4, max_tokens=12)
    output = llm.chat(prompts[0], params)[0]
    assert len({choice.token_ids for choice in output.outputs}) == 4
    one = llm.chat(prompts[0], SamplingParams(temperature=1.0, seed=3, max_tokens=12))[0]
    assert_same(llm, one, output, params)


def test_two_streams_may_run_side_by_side(llm: LLM, prompts: list) -> None:
    params = SamplingParams(max_tokens=10)
    first, second = llm.stream(prompts[0], params), llm.stream(prompts[3], params)
    texts = ["", ""]
    for one, two in zip(first, second, strict=False):
        texts[0] += one.text
        texts[1] += two.text
    texts[0] += "".join(delta.text for delta in first)
    texts[1] += "".join(delta.text for delta in second)
    assert texts[0].startswith(llm.chat(prompts[0], params)[0].text[:10])
    assert texts[1].startswith(llm.chat(prompts[3], params)[0].text[:10])


def test_inputs_that_cannot_run_leave_nothing_behind(llm: LLM) -> None:
    with pytest.raises(PromptError, match="is empty"):
        llm.generate(["Hello", ""])
    with pytest.raises(PromptError, match="outside the vocabulary"):
        llm.generate([[1, 2, 10**6]])
    with pytest.raises(PromptError, match="may hold"):
        llm.generate([[1] * 9000])
    with pytest.raises(ConfigError, match="3 prompts came with 2"):
        llm.generate(["a", "b", "c"], [SamplingParams(), SamplingParams()])
    with pytest.raises(ConfigError, match="outside the vocabulary"):
        llm.generate("Hello", SamplingParams(logit_bias={10**6: 1.0}))
    assert not llm.engine.has_unfinished


@pytest.mark.parametrize("prompt", [None, 1.5, [None], [1.5], ["a", 1], [1, "a"], [1, 1.7], b"ab", {"a": 1}, [[["a"]]]])
def test_what_is_no_prompt_is_refused(llm: LLM, prompt: object) -> None:
    with pytest.raises(PromptError, match="a prompt is text or"):
        llm.generate(prompt)  # type: ignore[arg-type]


@pytest.mark.parametrize("messages", ["x", None, [1], ["a"], [{"role": "user", "content": "x"}, "y"], {"role": "user"}])
def test_what_is_no_conversation_is_refused(llm: LLM, messages: object) -> None:
    with pytest.raises(PromptError, match="a conversation is a list of"):
        llm.chat(messages)  # type: ignore[arg-type]


@pytest.mark.parametrize("params", ["x", 1, [1], [None], {}])
def test_what_is_no_params_is_refused(llm: LLM, params: object) -> None:
    with pytest.raises(ConfigError, match="params must be SamplingParams"):
        llm.generate("ab", params)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="params must be SamplingParams"):
        llm.stream("ab", params)  # type: ignore[arg-type]
    assert not llm.engine.has_unfinished


def test_a_model_may_be_a_path_but_not_anything(tiny_llama: Path) -> None:
    small = EngineConfig(dtype="float32", num_threads=1, cache=CacheConfig(kv_cache_memory=4 << 20))
    assert LLM(tiny_llama, config=small).generate("ab", SamplingParams(max_tokens=1))[0].finished
    with pytest.raises(ConfigError, match="model must be"):
        LLM(3)  # type: ignore[arg-type]


def test_a_draft_model_of_another_vocabulary_is_refused_where_it_has_few_of_the_tokens(
    smollm2, tiny_llama: Path
) -> None:
    with pytest.raises(DraftMismatchError, match=r"changes the text|of the target's tokens"):
        LLM(smollm2, config=config(), speculation={"method": "draft_model", "model": str(tiny_llama)})


def test_a_draft_model_of_another_vocabulary(tiny_llama: Path, smollm2) -> None:
    """SmolLM2's own bytes are the tiny model's characters: the text is the same, greedy or not, alone or in a batch."""
    small = EngineConfig(num_threads=1, max_model_len=200, cache=CacheConfig(kv_cache_memory=8 << 20))
    options = {"method": "draft_model", "model": "smollm2-135m", "kv_cache_memory": 8 << 20, "force": True}
    llm = LLM(str(tiny_llama), config=small, speculation=options)
    for temperature in (0.0, 0.8):
        params = SamplingParams(max_tokens=20, temperature=temperature, seed=3, ignore_eos=True)
        prompts = ["Once upon a time", "ab ab ab"]
        plain, drafted = (llm.generate(prompts, replace(params, speculation=wanted)) for wanted in (False, True))
        assert [output.token_ids for output in drafted] == [output.token_ids for output in plain]
    assert llm.engine.metrics.num_draft_tokens > 0
    assert "; draft model with " in llm.model_card


def test_what_recycle_learned_outlives_the_llm_in_a_file(tiny_llama: Path, tmp_path: Path) -> None:
    small = EngineConfig(num_threads=1, cache=CacheConfig(kv_cache_memory=4 << 20))
    recycle = {"method": "recycle", "table": str(tmp_path / "table.npz")}
    outputs = []
    for speculation in ("none", recycle, recycle):
        with LLM(tiny_llama, config=small, speculation=speculation) as llm:
            outputs += llm.generate("ab ab ab", SamplingParams(max_tokens=24, ignore_eos=True))
    plain, cold, warm = outputs
    assert plain.token_ids == cold.token_ids == warm.token_ids
    assert warm.metrics.num_accepted_tokens > cold.metrics.num_accepted_tokens


def test_a_closed_llm_takes_no_more_requests(tiny_llama: Path, tmp_path: Path) -> None:
    small = EngineConfig(num_threads=1, cache=CacheConfig(kv_cache_memory=4 << 20))
    folder = tmp_path / "folder"
    folder.mkdir()
    llm = LLM(tiny_llama, config=small, speculation={"method": "recycle", "table": str(folder / "table.npz")})
    folder.rmdir()
    with pytest.raises(ConfigError, match="cannot be written"):
        llm.close()
    folder.mkdir()
    assert llm.generate("ab", SamplingParams(max_tokens=2))[0].finished, "not closed, since nothing was saved"
    llm.close()
    (folder / "table.npz").unlink()
    llm.close()
    assert not list(folder.iterdir()), "closing again does nothing"
    with pytest.raises(PromptError, match="this LLM is closed"):
        llm.generate("ab")
    with pytest.raises(PromptError, match="this LLM is closed"):
        next(llm.stream("ab"))


def test_a_stream_that_is_never_read_costs_nothing(llm: LLM) -> None:
    stream = llm.stream("Hello", SamplingParams(max_tokens=4))
    assert not llm.engine.has_unfinished
    del stream
    with pytest.raises(PromptError, match="is empty"):
        llm.stream("")


def test_a_draft_model_with_a_shorter_context_drafts_as_far_as_it_reaches(tiny_llama: Path, tmp_path: Path) -> None:
    short = write_tiny_llama(tmp_path / "short", context=32)
    small = EngineConfig(dtype="float32", num_threads=1, cache=CacheConfig(kv_cache_memory=4 << 20))
    llm = LLM(str(tiny_llama), config=small, speculation={"method": "draft_model", "model": str(short)})
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    plain, speculative = (llm.generate("ab ab", replace(params, speculation=wanted))[0] for wanted in (False, True))
    assert plain.token_ids == speculative.token_ids
    assert "accepted" in speculative.outputs[0].origins[:25]
    assert set(speculative.outputs[0].origins[40:]) == {"plain"}


def test_a_length_that_the_budget_does_not_hold_is_refused(tiny_llama: Path) -> None:
    with pytest.raises(CacheError, match="max_model_len is 512: give kv_cache_memory"):
        LLM(str(tiny_llama), config=EngineConfig(max_model_len=512, cache=CacheConfig(kv_cache_memory=20_000)))


def test_counters(llm: LLM) -> None:
    before = llm.metrics()
    output = llm.generate("one two one two one two one", SamplingParams(max_tokens=8))[0]
    name = "paceline:spec_decode_num_draft_tokens_total"
    assert llm.metrics()[name] == before[name] + output.metrics.num_draft_tokens


def test_an_llm_made_of_another_one_has_its_weights_and_its_text(tiny_llama: Path) -> None:
    small = EngineConfig(num_threads=1, cache=CacheConfig(kv_cache_memory=4 << 20))
    llm = LLM(str(tiny_llama), config=small, speculation="ngram")
    other = LLM(llm, speculation="none")
    assert other.config == replace(llm.config, speculation=other.config.speculation)
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    assert other.generate("ab ab", params)[0].token_ids == llm.generate("ab ab", params)[0].token_ids
    if llm.config.engine == "native":
        assert other.runner.weights is llm.runner.weights
    with pytest.raises(ConfigError, match="shares its weights, so dtype must be"):
        LLM(llm, config=replace(llm.config, dtype="bfloat16"))
