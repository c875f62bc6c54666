"""TorchRunner: the reference runner, on any torch device."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal, get_args

import numpy as np
import torch

from paceline.config import one_of
from paceline.errors import ConfigError, PacelineError
from paceline.interfaces import KVLayout
from paceline.models.architecture import ModelSpec
from paceline.models.torch_attention import AttentionPlan, AttentionShape
from paceline.models.torch_decoder import TorchDecoder
from paceline.sampling.sampler import sample_rows
from paceline.types import ForwardBatch, ForwardOutput, RowSampling

Precision = Literal["float32", "bfloat16"]
_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2}


def kv_bytes_per_block(spec: ModelSpec, *, block_size: int, dtype: Precision) -> int:
    """Bytes that block_size tokens take in the K/V pool, all layers together."""
    return spec.num_layers * block_size * 2 * spec.num_kv_heads * spec.head_dim * _BYTES[dtype]


class TorchRunner:
    """A model with its paged K/V pool; fulfils interfaces.Runner.

    weights: float32 arrays under the canonical names (those of Hugging Face's Llama), norms as effective multipliers.
    The output of a pass depends on the batch and the pool alone. float32 is the reference: between two packings of
    the same tokens, logits differ by rounding only.
    Raises ConfigError for a length, device or dtype that cannot be had, CorruptFileError for weights that do not fit.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: Mapping[str, np.ndarray],
        *,
        num_blocks: int,
        block_size: int = 16,
        max_model_len: int | None = None,
        dtype: Precision = "float32",
        device: str = "cpu",
        num_threads: int | None = None,
    ) -> None:
        one_of("dtype", dtype, get_args(Precision))
        if max_model_len is not None and max_model_len > spec.context_length:
            raise ConfigError(
                f"max_model_len must be at most the model's context of {spec.context_length}; got {max_model_len}."
            )
        self._device = _device(device)
        if self._device.type == "cpu":
            torch.set_num_threads(num_threads or _usable_cores())
        self._spec = spec
        self._max_model_len = max_model_len or spec.context_length
        self._dtype = torch.float32 if dtype == "float32" else torch.bfloat16
        self._kv = KVLayout(
            num_blocks=num_blocks,
            block_size=block_size,
            bytes_per_block=kv_bytes_per_block(spec, block_size=block_size, dtype=dtype),
        )
        self._attention = AttentionShape(
            num_heads=spec.num_heads,
            block_size=block_size,
            scale=spec.attention_scale,
            softcap=spec.attention_softcap,
        )
        with torch.inference_mode():
            self._decoder = TorchDecoder(
                spec, weights, max_model_len=self._max_model_len, dtype=self._dtype, device=self._device
            )
            # zeros, not empty: blocks are gathered whole, and a NaN in an unused slot would survive its zero weight
            self._pool = torch.zeros(
                (spec.num_layers, num_blocks * block_size, 2, spec.num_kv_heads, spec.head_dim),
                dtype=self._dtype,
                device=self._device,
            )

    @property
    def spec(self) -> ModelSpec:
        """The model that runs."""
        return self._spec

    @property
    def vocab_size(self) -> int:
        """Columns of the logits."""
        return self._spec.vocab_size

    @property
    def max_model_len(self) -> int:
        """Tokens that one sequence may hold."""
        return self._max_model_len

    @property
    def kv(self) -> KVLayout:
        """Shape of the K/V pool."""
        return self._kv

    def forward(self, batch: ForwardBatch, sampling: RowSampling | None = None) -> ForwardOutput:
        """One pass; hidden states are torch tensors [T, d] float32. Raises PacelineError where logits are NaN."""
        self._check(batch)
        with torch.inference_mode():
            plans = {
                window: AttentionPlan(batch, self._pool, self._attention, window=window)
                for window in set(self._spec.windows)
            }
            logits, hidden = self._decoder.run(
                self._indices(batch.token_ids),
                self._indices(batch.positions),
                slots=self._indices(batch.slots),
                pools=self._pool.flatten(2).unbind(0),
                plans=plans,
                rows=self._indices(batch.logit_rows),
                hidden_layers=batch.hidden_layers,
            )
            if logits.numel() and bool(torch.isnan(logits.max())):
                raise PacelineError(
                    "the model's logits are not numbers (NaN): its weights are damaged, or overflow in "
                    f"{str(self._dtype).removeprefix('torch.')}; check the file, or try dtype float32."
                )
            rows = logits.cpu().numpy()
        output = ForwardOutput(logits=rows) if sampling is None else sample_rows(rows, sampling)
        return replace(output, hidden=hidden) if hidden else output

    def move(self, src_slots: np.ndarray, dst_slots: np.ndarray) -> None:
        """Copies K/V of all layers between slots [K]; all sources are read before any destination is written."""
        with torch.inference_mode():
            rows = self._pool.index_select(1, self._indices(src_slots))
            self._pool.index_copy_(1, self._indices(dst_slots), rows)

    def _indices(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.asarray(values, dtype=np.int64)).to(self._device)

    def _check(self, batch: ForwardBatch) -> None:
        num_tokens, num_slots = len(batch.token_ids), self._kv.num_blocks * self._kv.block_size
        assert num_tokens > 0, "a pass has at least one token"
        assert _within(batch.token_ids, self._spec.vocab_size), "token ids are in the vocabulary"
        assert _within(batch.positions, self._max_model_len), "positions are within max_model_len"
        assert _within(batch.slots, num_slots), "slots are in the pool"
        assert _within(batch.logit_rows, num_tokens), "logit rows are tokens of the pass"
        assert batch.query_starts[-1] == num_tokens, "requests own all tokens"
        assert set(batch.hidden_layers) <= {*range(self._spec.num_layers + 1), "final"}, "hidden layers exist"


def _within(values: np.ndarray, stop: int) -> bool:
    return len(values) == 0 or bool(values.min() >= 0 and values.max() < stop)


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:  # torch asserts where it was built without the device
        reason = str(error).splitlines()[0]
        raise ConfigError(f"device {name!r} cannot be used ({reason}): try cpu.") from error
    return device


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
