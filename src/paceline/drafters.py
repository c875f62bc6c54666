"""From the settings of speculation to the drafter that they ask for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING

from paceline.config import METHODS, EngineConfig, installed_plug_ins, is_plug_in_path
from paceline.errors import ConfigError, DraftMismatchError
from paceline.interfaces import Drafter, Runner, Verifier
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
    verifier: Verifier
    progress: bool


def create(
    config: EngineConfig, *, target: LoadedModel, runner: Runner, verifier: Verifier, progress: bool
) -> Drafter | None:
    """The drafter that a resolved config's speculation names, for a target and its runner; None for method "none".

    Around it stands one that follows the predictions of requests that bring one.

    verifier: what the drafts will be held to. progress: show bars while a draft model is fetched and packed. Raises
    DraftMismatchError if the drafter does not fit, ConfigError for a plug-in that cannot be imported or built, and
    ModelError or CacheError as the target itself would.
    """
    from paceline.draft.hybrid import HybridDrafter
    from paceline.draft.prediction import PredictionDrafter

    order, rule = _Order(config, target, runner, verifier, progress), config.speculation
    if rule.method == "none":
        return None
    drafters = [_build(method, order) for method in rule.methods]
    drafter = drafters[0]
    if len(drafters) > 1:
        drafter = HybridDrafter(drafters, vocab_size=runner.vocab_size, selects=not rule.adaptive)
    return PredictionDrafter(drafter, max_draft_tokens=rule.max_draft_tokens)


def _build(method: str, order: _Order) -> Drafter:
    return _BUILDERS[method](order) if method in METHODS else _plug_in(method, order)


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
    own = runners.for_draft_model(config, model)
    cache = replace(own.cache, kv_cache_memory=rule.kv_cache_memory)
    if rule.prefix_caching is not None:
        cache = replace(cache, prefix_caching=rule.prefix_caching)
    context = model.spec.context_length  # where a draft model's ends, it drafts no more
    runner = runners.create_runner(
        model,
        own,
        cache=cache,
        max_model_len=min(config.max_model_len or context, context),
        progress=order.progress,
        twin=order.runner if model is target and own == config else None,
    )
    return DraftModelDrafter(
        runner,
        vocabulary=vocabulary,
        rule_needs_law=order.verifier.needs_laws,
        width=rule.width,
        least_reach=rule.least_reach,
        prefix_caching=cache.prefix_caching,
        eos_ids=target.tokenizer.eos_ids,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
    )


def _vocabulary(target: LoadedModel, model: LoadedModel, *, force: bool) -> DraftVocabulary:
    """How the tokens of a draft model and its target belong together."""
    from paceline.draft.cross_vocabulary import CrossVocabulary
    from paceline.draft.shared_vocabulary import SharedVocabulary

    target_size, own_size = target.spec.vocab_size, model.spec.vocab_size
    if target.tokenizer.fingerprint == model.tokenizer.fingerprint:
        return SharedVocabulary(target_size=target_size, own_size=own_size)
    return CrossVocabulary(target.tokenizer, model.tokenizer, target_size=target_size, own_size=own_size, force=force)


def _suffix(order: _Order) -> Drafter:
    from paceline.draft.suffix import SuffixDrafter

    return SuffixDrafter(chain=order.verifier.chains_only, store_tokens=order.config.speculation.store_tokens)


def _recycle(order: _Order) -> Drafter:
    from paceline.draft.recycle import LEAST_OFFERED, LEAST_REACH, RecycleDrafter

    target, rule = order.target, order.config.speculation
    table = rule.table
    return RecycleDrafter(
        vocab_size=target.spec.vocab_size,
        chain=order.verifier.chains_only,
        least_reach=LEAST_OFFERED if rule.adaptive else LEAST_REACH,
        table=table,
        fingerprint="" if table is None else target.tokenizer.fingerprint,
    )


def _layer_skip(order: _Order) -> Drafter:
    from paceline.draft.layer_skip import LayerSkipDrafter, check_layers, default_layers
    from paceline.models.tuned_layers import read_tuned

    target, layers = order.target, order.config.speculation.layers
    num_layers = target.spec.num_layers
    if layers is None:
        tuned = read_tuned(target.path, num_layers=num_layers)
        layers = default_layers(num_layers) if tuned is None else tuned.layers
    check_layers(layers, num_layers=num_layers)
    return LayerSkipDrafter(
        order.runner,
        layers=layers,
        rule_needs_law=order.verifier.needs_laws,
        eos_ids=target.tokenizer.eos_ids,
    )


def _plug_in(method: str, order: _Order) -> Drafter:
    """Whatever a plug-in's code raises, now and later, becomes one error that names the plug-in."""
    from paceline.draft.plug_in import PlugInDrafter, reason_of

    try:
        if is_plug_in_path(method):
            module, _, name = method.partition(":")
            cls = getattr(import_module(module), name)
        else:
            cls = installed_plug_ins()[method].load()
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"method {method!r}: the plug-in cannot be imported ({reason_of(error)}). Install it, or put its folder on "
            "PYTHONPATH."
        ) from error
    if not (isinstance(cls, type) and Drafter in cls.__mro__):
        raise DraftMismatchError(
            f"method {method!r} is no drafter: it must be a class that derives from paceline.interfaces.Drafter."
        )
    options = order.config.speculation.options or {}
    try:
        made = cls(**options)
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"method {method!r}: {cls.__name__} cannot be made with options {dict(options)!r:.100} "
            f"({reason_of(error)}). They are the keyword arguments of the class."
        ) from error
    drafter = PlugInDrafter(made, method=method)
    _check_declarations(drafter, method, num_layers=order.target.spec.num_layers)
    return drafter


def _check_declarations(drafter: Drafter, method: str, *, num_layers: int) -> None:
    name, count = drafter.name, drafter.num_successors
    if not (isinstance(name, str) and name):
        raise DraftMismatchError(
            f"method {method!r}: a drafter needs a name; got {name!r:.100}: set name in its class."
        )
    if not isinstance(count, int) or isinstance(count, bool) or count < 0:
        raise DraftMismatchError(f"drafter {name!r}: num_successors must be an integer >= 0; got {count!r:.100}.")
    layers = drafter.hidden_layers
    if not isinstance(layers, tuple) or not all(layer in (*range(num_layers + 1), "final") for layer in layers):
        raise DraftMismatchError(
            f'drafter {name!r}: hidden_layers must be a tuple of 0 to {num_layers} or "final"; got {layers!r:.100}.'
        )


_BUILDERS: Mapping[str, Callable[[_Order], Drafter]] = {
    "ngram": _ngram,
    "suffix": _suffix,
    "recycle": _recycle,
    "draft_model": _draft_model,
    "layer_skip": _layer_skip,
}
