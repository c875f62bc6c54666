"""The search for layers to keep: what it finds, what it measures, and what a subset is worth."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from batches import make_batch
from native_models import CASES, case_runner
from paceline.bench.layer_agreement import LayerAgreement, Text
from paceline.bench.layer_costs import LayerCosts, measure_costs
from paceline.bench.layer_search import Subset, search
from paceline.bench.memo import Memo
from paceline.errors import CacheError
from paceline.testing import ToyModel

FLAT = LayerCosts(passes=(1.0, 1.05, 1.1, 1.15, 1.2), fixed=0.1, layer=0.09)  # ten layers; verifying is cheap


def test_speedup_is_tokens_over_time_at_the_best_length() -> None:
    costs = LayerCosts(passes=(1.0, 1.25, 1.5), fixed=0.25, layer=0.125)
    assert costs.speedup(0.5, num_layers=2) == ((1 + 0.5) / (0.5 + 1.25), 1)
    assert costs.speedup(1.0, num_layers=2) == (3 / (2 * 0.5 + 1.5), 2)


def test_the_search_finds_the_best_subset_where_losses_add_up() -> None:
    losses = np.array([0.5, 0.01, 0.2, 0.0, 0.03, 0.3, 0.02, 0.02, 0.15, 0.4])
    measured = []

    def evaluate(layers: tuple[int, ...]) -> float:
        measured.append(layers)
        return max(0.0, 1 - sum(losses[i] for i in range(10) if i not in layers))

    found = search(evaluate, num_layers=10, costs=FLAT)
    subsets = [s for n in range(1, 10) for s in itertools.combinations(range(10), n)]
    best = max(subsets, key=lambda s: FLAT.speedup(evaluate(s), num_layers=len(s)))
    assert found.layers == best == (0, 2, 5, 8, 9)
    assert (found.speedup, found.draft_length) == FLAT.speedup(found.agreement, num_layers=5)
    search_only = measured[: len(measured) - len(subsets)]
    assert len(search_only) < 30  # measuring every layer that is left each time would be 10 + 9 + .. = 54


def test_the_search_ends_where_nothing_pays() -> None:
    calls = []
    found = search(lambda layers: calls.append(layers) or 0.0, num_layers=30, costs=FLAT)
    assert isinstance(found, Subset)
    assert found.speedup < 1
    assert min(map(len, calls)) == 1  # nothing to lose: every layer less is cheaper


def test_costs_are_relative_to_a_pass_over_one_token() -> None:
    spec, _ = CASES["q8_0"]
    costs = measure_costs(case_runner("q8_0"), num_layers=spec.num_layers)
    assert costs.passes[0] == 1.0
    assert all(cost > 0 for cost in costs.passes)
    assert costs.layer >= 0
    assert costs.fixed >= 0


def test_agreement_is_counted_as_a_draft_would_go() -> None:
    """Against drafts written by hand: exact K/V up to the block, then what the layers themselves computed."""
    runner, texts = case_runner("q8_0", block_size=4, num_blocks=200), []
    for prompt_length, length in ((5, 21), (8, 16), (1, 9), (3, 4)):
        texts.append(Text(_answered(list(range(prompt_length)), length), prompt_length))
    agreement = LayerAgreement(runner, texts)
    shares = set()
    for layers in ((0, 1, 2), (0, 2), (0, 1, 3)):
        expected = []
        for text in texts:
            for start in range(0, len(text.token_ids) - 1, 4):
                own = text.token_ids[start : min(start + 4, len(text.token_ids) - 1)]
                other = case_runner("q8_0", block_size=4)
                table = list(range(8))
                if start:
                    other.forward(make_batch([{"tokens": text.token_ids[:start], "context": 0, "table": table}]))
                request = {"tokens": own, "context": start, "table": table}
                logits = other.forward(make_batch([request], layers=layers)).logits
                assert logits is not None
                after = text.token_ids[start + 1 : start + 1 + len(own)]
                wanted = np.arange(start + 1, start + 1 + len(own)) >= text.prompt_length
                expected += (logits.argmax(axis=1) == after)[wanted].tolist()
        assert agreement.num_tokens == len(expected) == 16 + 8 + 8 + 1
        assert agreement(layers) == np.mean(expected)
        shares.add(agreement(layers))
    assert len(shares) > 1


def test_answers_of_the_model_agree_with_all_of_its_layers() -> None:
    runner = case_runner("q8_0", block_size=4, num_blocks=200)
    agreement = LayerAgreement(runner, [Text(_answered([3, 1, 4], 15), 3)])
    assert agreement(range(CASES["q8_0"][0].num_layers)) == 1.0


def test_texts_beyond_the_cache_are_refused() -> None:
    runner = ToyModel(num_blocks=70, block_size=4)
    with pytest.raises(CacheError, match="take 74 K/V blocks, the cache has 70: raise --kv-cache-memory"):
        LayerAgreement(runner, [Text(np.arange(20, dtype=np.int32), 3)] * 2)


def test_memo_computes_each_value_once_and_survives(tmp_path) -> None:
    path = tmp_path / "folder" / "memo.json"
    memo = Memo(path, key="k")
    assert memo("a", lambda: [1, 2.5]) == [1, 2.5]
    with pytest.raises(KeyboardInterrupt):
        memo("b", _interrupt)
    again = Memo(path, key="k")
    assert len(again) == 1
    assert again("a", _interrupt) == [1, 2.5]
    assert len(Memo(path, key="other")) == 0
    again.forget()
    assert not list(path.parent.iterdir())


def _answered(known: list[int], length: int) -> np.ndarray:
    """The model's own text of that length after known tokens."""
    runner = case_runner("q8_0", block_size=4)
    while len(known) < length:
        request = {"tokens": known, "context": 0, "table": list(range(8))}
        logits = runner.forward(make_batch([request])).logits
        assert logits is not None
        known.append(int(logits[-1].argmax()))
    return np.array(known, dtype=np.int32)


def _interrupt() -> None:
    raise KeyboardInterrupt
