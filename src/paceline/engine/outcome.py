"""What one verified step adds to a sequence, and where the output ends: exactly where plain decoding would end."""

from __future__ import annotations

import numpy as np

from paceline.engine.packing import Rows
from paceline.engine.request import Sequence
from paceline.engine.scheduler import ScheduledSequence
from paceline.sampling.sampler import raw_logprobs
from paceline.types import Delta, Draft, ForwardOutput, Logprobs, RequestOutput, TokenLogprob, Verdict


def extend(
    part: ScheduledSequence,
    draft: Draft | None,
    verdict: Verdict,
    *,
    output: ForwardOutput,
    rows: Rows,
    max_model_len: int,
) -> list[int]:
    """Appends the verdict's tokens up to the first stop and counts them as computed. Returns the tokens kept."""
    sequence = part.sequence
    path = verdict.path
    emitted = [verdict.final_token]
    if draft is not None:
        drafted = draft.token_ids.tolist()
        emitted = [*(drafted[node] for node in path), verdict.final_token]
    kept = _append_until_stop(sequence, emitted, max_model_len=max_model_len)
    num_accepted = min(len(path), kept)
    sequence.note_tokens()
    sequence.num_computed = min(sequence.num_computed + part.num_tokens + num_accepted, len(sequence.tokens) - 1)
    final_origin = verdict.kind if draft is not None else "plain"
    sequence.origins += ["accepted"] * num_accepted + [final_origin] * (kept - num_accepted)
    if sequence.params.logprobs is not None:
        row_of_token = [rows.sample.start, *(rows.sample.start + 1 + node for node in path)][:kept]
        sequence.logprobs += _logprobs(sequence, emitted[:kept], np.array(row_of_token), output)
    sequence.speculation.count(draft, path[: kept - 1])  # not the step's last token, a node where the output ended
    return emitted[:kept]


def delta(sequence: Sequence, token_ids: list[int], *, output: RequestOutput | None = None) -> Delta:
    """What a step that added these tokens tells a stream; the text is what has become certain since the last one."""
    text = sequence.detokenizer.take() if sequence.detokenizer is not None else ""
    origins, logprobs = sequence.origins, sequence.logprobs
    return Delta(
        sequence.request.id,
        sequence.index,
        text,
        tuple(token_ids),
        tuple(origins[len(origins) - len(token_ids) :]),
        output,
        tuple(logprobs[len(logprobs) - len(token_ids) :]) if sequence.params.logprobs is not None else None,
        sequence.finish_reason,
        sequence.stop_reason,
    )


def note_prompt_logprobs(sequence: Sequence, output: ForwardOutput, rows: Rows) -> None:
    """Keeps the log-probabilities of the prompt tokens whose rows were in this pass."""
    count = rows.prompt.stop - rows.prompt.start
    if count:
        assert output.logprobs is not None
        at = len(sequence.prompt_logprobs) + 1
        token_ids = sequence.tokens.view()[at : at + count].tolist()
        top_n = sequence.params.prompt_logprobs or 0
        sequence.prompt_logprobs += _read(
            output.logprobs, np.arange(rows.prompt.start, rows.prompt.stop), token_ids, top_n
        )


def _append_until_stop(sequence: Sequence, emitted: list[int], *, max_model_len: int) -> int:
    """Appends tokens, one by one where any of them could end the output. Returns how many were kept."""
    params = sequence.params
    detokenizer, num_before = sequence.detokenizer, sequence.num_output
    room = min(params.max_tokens - num_before, max_model_len - len(sequence.tokens))
    for index, token_id in enumerate(emitted):
        if token_id in sequence.ends:
            sequence.finish_reason = "stop"
            sequence.stop_reason = token_id if token_id in params.stop_token_ids else None
        elif params.stop and detokenizer is not None:
            stop = detokenizer.append([token_id], may_stop=num_before + index + 1 >= params.min_tokens)
            if stop is not None:
                sequence.finish_reason, sequence.stop_reason = "stop", stop
        if sequence.finish_reason is None and index + 1 == room:
            sequence.finish_reason = "length"
        if sequence.finish_reason is not None:
            emitted = emitted[: index + 1]
            break
    sequence.append(emitted)
    _end_with_grammar(sequence)
    if detokenizer is not None:
        if not params.stop:  # all at once; a stop token is not part of the text
            detokenizer.append(emitted[:-1] if emitted[-1] in sequence.ends else emitted)
        if sequence.finish_reason is not None:
            detokenizer.close()
    return len(emitted)


def _end_with_grammar(sequence: Sequence) -> None:
    """Ends an output that its grammar lets nothing follow. A draft never goes on beyond that: see GrammarState."""
    if sequence.grammar is None:
        return
    if sequence.grammar.status == "complete" and sequence.finish_reason in (None, "length"):
        sequence.finish_reason = "stop"
    elif sequence.grammar.status == "stuck" and sequence.finish_reason is None:
        sequence.finish_reason, sequence.stop_reason = "abort", "grammar"


def _logprobs(sequence: Sequence, token_ids: list[int], rows: np.ndarray, output: ForwardOutput) -> list[TokenLogprob]:
    top_n = sequence.params.logprobs or 0
    if output.logits is not None:  # a rule whose tokens are not the rows' own samples
        logprobs = raw_logprobs(output.logits[rows], np.array(token_ids, dtype=np.int32), num_logprobs=top_n)
        return _read(logprobs, np.arange(len(rows)), token_ids, top_n)
    assert output.logprobs is not None
    return _read(output.logprobs, rows, token_ids, top_n)


def _read(logprobs: Logprobs, rows: np.ndarray, token_ids: list[int], top_n: int) -> list[TokenLogprob]:
    result = []
    for row, token_id in zip(rows.tolist(), token_ids, strict=True):
        top = zip(logprobs.top_ids[row, :top_n].tolist(), logprobs.top[row, :top_n].tolist(), strict=True)
        result.append(TokenLogprob(token_id, float(logprobs.token[row]), int(logprobs.rank[row]), tuple(top)))
    return result
