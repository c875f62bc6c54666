"""From the settings of speculation to the drafter that they ask for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from paceline.config import EngineConfig
from paceline.interfaces import Drafter, Runner
from paceline.models import runners

if TYPE_CHECKING:
    from paceline.draft.shared_vocabulary import DraftVocabulary
    from paceline.models.loader import LoadedModel


@dataclass(frozen=True, slots=True)
class _Order:
    """What a builder may need to know."""

    config: EngineConfig
    target: LoadedModel
    runner: Runner
    needs_laws: bool
    progress: bool


def create(
    config: EngineConfig, *, target: LoadedModel, runner: Runner, needs_laws: bool, progress: bool
) -> Drafter | None:
    """The drafter that a resolved config's speculation names, for a target and its runner; None for method "none".

    needs_laws: the verification rule's. progress: show bars while a draft model is fetched and packed. Raises
    DraftMismatchError if the drafter does not fit, and ModelError or CacheError as the target itself would.
    """
    method = config.speculation.method
    return None if method == "none" else _BUILDERS[method](_Order(config, target, runner, needs_laws, progress))


def _ngram(order: _Order) -> Drafter:
    from paceline.draft.ngram import NgramDrafter

    rule = order.config.speculation
    return NgramDrafter(max_ngram=rule.max_ngram, min_ngram=rule.min_ngram)


def _draft_model(order: _Order) -> Drafter:
    from paceline.draft.draft_model import DraftModelDrafter
    from paceline.models.loader import load

    config, target, rule = order.config, order.target, order.config.speculation
    assert rule.model is not None
    model = target if rule.model == target.name else load(rule.model, progress=order.progress)
    vocabulary = _vocabulary(target, model, force=rule.force)
    cache = replace(config.cache, kv_cache_memory=rule.kv_cache_memory)
    context = model.spec.context_length  # where a draft model's ends, it drafts no more
    runner = runners.create_runner(
        model,
        runners.for_draft_model(config, model),
        cache=cache,
        max_model_len=min(config.max_model_len or context, context),
        progress=order.progress,
        twin=order.runner if model is target else None,
    )
    return DraftModelDrafter(
        runner,
        vocabulary=vocabulary,
        rule_needs_law=order.needs_laws,
        prefix_caching=cache.prefix_caching,
        eos_ids=target.tokenizer.eos_ids,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
    )


def _vocabulary(target: LoadedModel, model: LoadedModel, *, force: bool) -> DraftVocabulary:
    """How the tokens of a draft model and its target belong together."""
    from paceline.draft.cross_vocabulary import CrossVocabulary
    from paceline.draft.shared_vocabulary import SharedVocabulary

    sizes = {"target_size": target.spec.vocab_size, "own_size": model.spec.vocab_size}
    if target.tokenizer.fingerprint == model.tokenizer.fingerprint:
        return SharedVocabulary(**sizes)
    return CrossVocabulary(target.tokenizer, model.tokenizer, **sizes, force=force)


_BUILDERS: Mapping[str, Callable[[_Order], Drafter]] = {
    "auto": _ngram,
    "ngram": _ngram,
    "draft_model": _draft_model,
}
