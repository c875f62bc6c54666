"""The tokens that came nearest to being sampled: what a tree of drafts branches into."""

from __future__ import annotations

import numpy as np

from paceline.sampling.filters import best_first, survivors
from paceline.sampling.processors import adjusted_row
from paceline.sampling.race import negative_scores, row_uniforms
from paceline.types import RowSampling

_LEAST_SCORE = 1e-26  # a token that does not score more is no candidate; the native engine's bounds end there


def candidates(logits: np.ndarray, sampling: RowSampling) -> tuple[np.ndarray, np.ndarray]:
    """The num_candidates tokens of the best race scores of each row of logits [M, V] float32, among what filters keep.

    Greedy rows rank adjusted logits instead, of all tokens. Returns ids [M, k] int32, best first, and log scores [M, k]
    float32: log weight - log E as in the race, of greedy rows the distance to the largest logit. -1 and -inf fill up.
    """
    shape = len(logits), min(sampling.num_candidates, logits.shape[1])
    ids = np.full(shape, -1, dtype=np.int32)
    scores = np.full(shape, -np.inf, dtype=np.float32)
    for i in range(len(logits)):
        row = adjusted_row(logits, sampling, i)
        largest = row.max()
        if largest == -np.inf:
            continue
        if sampling.temperature[i] == 0:
            best = best_first(row, shape[1])
            best = best[row[best] > -np.inf]
            ids[i, : len(best)], scores[i, : len(best)] = best, row[best] - largest
        else:
            kept, log_weights = survivors(row, sampling, i)
            all_scores = -negative_scores(np.exp(log_weights), row_uniforms(len(row), sampling, i)[kept])
            best = best_first(all_scores, shape[1])
            best = best[all_scores[best] > _LEAST_SCORE]
            ids[i, : len(best)], scores[i, : len(best)] = kept[best], np.log(all_scores[best])
    return ids, scores
