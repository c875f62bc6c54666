"""Samples the wanted rows of a pass. Plain decoding, verification and draft models all draw through here."""

from __future__ import annotations

import numpy as np

from paceline.sampling.candidates import candidates
from paceline.sampling.filters import best_first, normalised, survivors
from paceline.sampling.noise import to_uniform, words
from paceline.sampling.processors import adjusted_row
from paceline.sampling.race import race, row_uniforms
from paceline.types import ForwardOutput, Logprobs, RowSampling, TokenMap

# exp(-27) of the likeliest weight cannot win: 1/E lies between 1/22.9 and 2^33, less than a factor exp(26.1) apart.
_HOPELESS = -27.0

# Rows with at most this many candidates draw the words of those alone, all such rows of a pass in one go; a longer
# list would touch most of the row's words anyway.
_FEW = 1024


def sample_rows(logits: np.ndarray, sampling: RowSampling) -> ForwardOutput:
    """Samples each row of logits [M, V] float32, which are left as they are.

    A row's token depends on that row of logits and sampling alone: the argmax when greedy, else the winner of the
    exponential race over the processed logits, with the words of docs/noise.md; lowest id on ties. Raw
    log-probabilities, logits, laws and candidates come along where asked. Raises ConfigError if a row bans every
    token, unless it is sampled through a token_map.
    """
    raw_logits = logits
    if sampling.token_map is not None:
        logits = _mapped(logits, sampling.token_map)
    num_rows, vocab_size = logits.shape
    laws = np.zeros(logits.shape) if sampling.want_laws else None
    if laws is None and sampling.adjustments is None and sampling.allowed is None and not sampling.temperature.any():
        token_ids = logits.argmax(axis=-1).astype(np.int32)
    else:
        token_ids = np.empty(num_rows, dtype=np.int32)
        few: list[tuple[int, np.ndarray, np.ndarray]] = []
        for i in range(num_rows):
            row = adjusted_row(logits, sampling, i)
            if sampling.token_map is not None and row.max() == -np.inf:
                token_ids[i] = -1
                continue
            ids, log_weights = survivors(row, sampling, i)
            if laws is not None:
                laws[i, ids] = normalised(log_weights)
            ids, log_weights = _hopeful(ids, log_weights)
            if len(ids) == 1:
                token_ids[i] = ids[0]
            elif len(ids) <= _FEW:
                few.append((i, ids, np.exp(log_weights)))
            else:
                token_ids[i] = ids[race(np.exp(log_weights), row_uniforms(vocab_size, sampling, i)[ids])]
        for (i, ids, weights), uniforms in zip(few, _few_uniforms(few, sampling), strict=True):
            token_ids[i] = ids[race(weights, uniforms)]
    best, scores = candidates(logits, sampling) if sampling.num_candidates else (None, None)
    return ForwardOutput(
        token_ids=token_ids,
        logits=raw_logits if sampling.want_logits else None,
        laws=laws,
        logprobs=_reported(logits, sampling, token_ids),
        successors=_successors(logits, sampling.num_successors),
        candidates=best,
        candidate_scores=scores,
    )


def raw_logprobs(logits: np.ndarray, token_ids: np.ndarray, *, num_logprobs: int) -> Logprobs:
    """Log-probabilities of token_ids [M], and the best num_logprobs, under logits [M, V] float32.

    No processor comes before them: they are the model's own.
    """
    count = min(num_logprobs, logits.shape[-1])
    token = np.empty(len(logits), dtype=np.float32)
    rank = np.empty(len(logits), dtype=np.int32)
    top_ids = np.empty((len(logits), count), dtype=np.int32)
    top = np.empty((len(logits), count), dtype=np.float32)
    for i, row in enumerate(logits):
        likeliest = row.max()
        log_total = float(likeliest) + np.log(np.exp(row - likeliest).sum(dtype=np.float64))
        value = row[token_ids[i]]
        token[i] = value - log_total
        rank[i] = 1 + np.count_nonzero(row > value)
        top_ids[i] = best_first(row, count)
        top[i] = row[top_ids[i]] - log_total
    return Logprobs(token=token, rank=rank, top_ids=top_ids, top=top)


def race_margin(logits: np.ndarray, sampling: RowSampling) -> float:
    """Gap between the best two candidates of one row, logits [V] float32: how far rounding is from changing its token.

    In log race scores, or in adjusted logits when the row is greedy; inf where only one token is left. `sampling`
    holds that row alone.
    """
    row = adjusted_row(logits[None], sampling, 0)
    if sampling.temperature[0] == 0:
        scores = row.astype(np.float64)
    else:
        ids, scores = survivors(row, sampling, 0)
        scores = scores - np.log(-np.log(row_uniforms(len(row), sampling, 0)[ids]))
    if len(scores) < 2:
        return float("inf")
    second, best = np.partition(scores, len(scores) - 2)[-2:]
    return float(best - second)


def _mapped(logits: np.ndarray, token_map: TokenMap) -> np.ndarray:
    """Logits [M, V] in the ids of the map: [M, size], -inf where no token of the model is."""
    known = np.flatnonzero(token_map.ids >= 0)
    mapped = np.full((len(logits), token_map.size), -np.inf, dtype=np.float32)
    mapped[:, token_map.ids[known]] = logits[:, known]
    return mapped


def _reported(logits: np.ndarray, sampling: RowSampling, token_ids: np.ndarray) -> Logprobs | None:
    if sampling.num_logprobs is None:
        return None
    if sampling.logprob_ids is not None:
        token_ids = np.where(sampling.logprob_ids >= 0, sampling.logprob_ids, token_ids)
    return raw_logprobs(logits, token_ids, num_logprobs=sampling.num_logprobs)


def _successors(logits: np.ndarray, count: int) -> np.ndarray | None:
    if count < 1:
        return None
    best = [best_first(row, count) for row in logits]
    return np.array(best, dtype=np.int32).reshape(len(logits), min(count, logits.shape[1]))


def _hopeful(ids: np.ndarray, log_weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The tokens that could win, or all where sifting costs more than it saves."""
    hopeful = log_weights > _HOPELESS
    if 2 * np.count_nonzero(hopeful) < len(ids):
        return ids[hopeful], log_weights[hopeful]
    return ids, log_weights


def _few_uniforms(few: list[tuple[int, np.ndarray, np.ndarray]], sampling: RowSampling) -> list[np.ndarray]:
    """u of the candidates of some rows (row, ids [K], weights): [K] float64 of each."""
    if not few:
        return []
    sizes = [len(ids) for _, ids, _ in few]
    ids = np.concatenate([ids for _, ids, _ in few])
    rows = np.repeat([i for i, _, _ in few], sizes)
    counter = {
        name: getattr(sampling, name).astype(np.uint64)[rows] for name in ("seed", "stream", "position", "purpose")
    }
    drawn = words(ids >> 2, **counter)[np.arange(len(ids)), ids & 3]
    return np.split(to_uniform(drawn), np.cumsum(sizes)[:-1])
