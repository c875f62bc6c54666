"""llama.cpp, through llama-cpp-python, on the GGUF file and token ids that Paceline is given.

usage: llama_cpp_python.py [MODEL] --prompts FILE [--per-category N] [--max-tokens N] [--prompt-lookup]
       [--perplexity FILE]
Greedy, one request at a time. Prints one JSON line; plain, with the cost of a pass by number of tokens, too. Prompt
lookup is the library's own, which its high-level class runs. llama.cpp is compiled for this machine when first used.
"""

from __future__ import annotations

import ctypes
import time
from typing import Any

import environment
from measuring import PASS_CONTEXT, PASS_SIZES, Output, measure, pass_milliseconds, perplexity

VERSION = "0.3.36"
SYSTEM = f"llama.cpp (llama-cpp-python {VERSION})"
INSTALL = [[f"llama-cpp-python=={VERSION}", "numpy==2.4.6"]]
CONTEXT_TOKENS = 4096


class Session:
    """One sequence in llama.cpp's memory. Contexts are llama.cpp's defaults but for size and threads."""

    def __init__(self, path: str, *, threads: int) -> None:
        import llama_cpp
        import numpy as np

        self._api, self._np = llama_cpp, np
        self._silence = llama_cpp.llama_log_callback(lambda level, text, data: None)  # kept: C holds the pointer only
        llama_cpp.llama_log_set(self._silence, ctypes.c_void_p())
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
        parameters = llama_cpp.llama_context_default_params()
        parameters.n_ctx = parameters.n_batch = CONTEXT_TOKENS
        parameters.n_threads = parameters.n_threads_batch = threads
        self._context = llama_cpp.llama_init_from_model(self._model, parameters)
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._batch = llama_cpp.llama_batch_init(CONTEXT_TOKENS, 0, 1)

    def forget(self, start: int) -> None:
        """Drops the tokens from position `start` on."""
        self._api.llama_memory_seq_rm(self._memory, 0, start, -1)

    def decode(self, ids: list[int], *, start: int, every_row: bool = False) -> None:
        """One pass over ids, which take the positions from `start` on; logits of the last row, or of every row."""
        batch = self._batch
        batch.n_tokens = len(ids)
        for index, token_id in enumerate(ids):
            batch.token[index] = token_id
            batch.pos[index] = start + index
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = 0
            batch.logits[index] = every_row or index == len(ids) - 1
        code = self._api.llama_decode(self._context, batch)
        if code != 0:
            raise SystemExit(f"error: llama_decode ended with code {code} for {len(ids)} tokens at {start}.")

    def best(self) -> int:
        """The likeliest token of the last pass's last row."""
        return int(self._logits(-1).argmax())

    def log_likelihood(self, ids: list[int]) -> float:
        """Sum of log p(ids[i] | ids[:i]) over i >= 1."""
        self.forget(0)
        self.decode(ids, start=0, every_row=True)
        total = 0.0
        for row, token_id in enumerate(ids[1:]):
            z = self._logits(row).astype(self._np.float64)
            peak = z.max()
            total += float(z[token_id] - peak - self._np.log(self._np.exp(z - peak).sum()))
        return total

    def _logits(self, row: int) -> Any:
        """[V] float32 of a row of the last pass; -1 = its last."""
        pointer = self._api.llama_get_logits_ith(self._context, row)
        return self._np.ctypeslib.as_array(pointer, (self._vocab_size,))


def report(workload: dict[str, Any]) -> dict[str, Any]:
    """Speed on the prompts, if there are any, and the perplexity of the text, if there is one."""
    result: dict[str, Any] = {}
    if workload["prompts"]:
        result = lookup_report(workload) if workload["draft_tokens"] else plain_report(workload)
    if workload["perplexity_ids"]:
        session = Session(workload["model"], threads=workload["threads"])
        result["perplexity"] = perplexity(workload["perplexity_ids"], session.log_likelihood)
    return result


def plain_report(workload: dict[str, Any]) -> dict[str, Any]:
    session = Session(workload["model"], threads=workload["threads"])
    eos_ids = set(workload["eos_ids"])

    def generate(prompt_ids: list[int], max_tokens: int) -> Output:
        session.forget(0)
        start = time.perf_counter()
        session.decode(prompt_ids, start=0)
        ids = [session.best()]
        first_token = time.perf_counter()
        while len(ids) < max_tokens and ids[-1] not in eos_ids:
            session.decode(ids[-1:], start=len(prompt_ids) + len(ids) - 1)
            ids.append(session.best())
        return Output(ids, first_token - start, time.perf_counter() - start)

    def one_pass(size: int) -> None:
        session.decode(tail[:size], start=PASS_CONTEXT, every_row=True)
        session.best()  # waits for the pass
        session.forget(PASS_CONTEXT)

    result = {"system": f"{SYSTEM} plain", **measure(workload, generate)}
    session.forget(0)
    session.decode(workload["prefill_ids"][:PASS_CONTEXT], start=0)
    tail = workload["prefill_ids"][PASS_CONTEXT : PASS_CONTEXT + max(PASS_SIZES)]
    return result | {"pass_milliseconds": pass_milliseconds(one_pass)}


def lookup_report(workload: dict[str, Any]) -> dict[str, Any]:
    """Prompt lookup by the class that the library ships for it."""
    from llama_cpp import Llama
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    llama = Llama(
        workload["model"],
        n_ctx=CONTEXT_TOKENS,
        n_batch=CONTEXT_TOKENS,
        n_threads=workload["threads"],
        n_threads_batch=workload["threads"],
        logits_all=True,  # without it prompts beyond 512 tokens end in a shape error
        verbose=False,
        draft_model=LlamaPromptLookupDecoding(num_pred_tokens=workload["draft_tokens"]),
    )
    eos_ids = set(workload["eos_ids"])

    def generate(prompt_ids: list[int], max_tokens: int) -> Output:
        llama.reset()
        start = first_token = time.perf_counter()
        ids: list[int] = []
        for token_id in llama.generate(prompt_ids, temp=0.0):
            if not ids:
                first_token = time.perf_counter()
            ids.append(token_id)
            if len(ids) == max_tokens or token_id in eos_ids:
                break
        return Output(ids, first_token - start, time.perf_counter() - start)

    return {"system": f"{SYSTEM} prompt lookup", **measure(workload, generate)}


if __name__ == "__main__":
    environment.main(__file__, INSTALL, report, usage=__doc__)
