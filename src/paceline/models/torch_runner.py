"""TorchRunner: the reference runner, on any torch device."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Literal, get_args

import numpy as np
import torch

from paceline.config import one_of, usable_cores
from paceline.errors import CacheError, ConfigError, PacelineError
from paceline.models.architecture import ModelSpec
from paceline.models.runner_base import RunnerBase
from paceline.models.torch_attention import AttentionPlan, AttentionShape
from paceline.models.torch_decoder import TorchDecoder
from paceline.models.weights import expected_shapes
from paceline.sampling.sampler import sample_rows
from paceline.types import ForwardBatch, ForwardOutput, RowSampling

Precision = Literal["float32", "bfloat16"]
_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2}
_MAX_THREADS = 1024  # OpenMP ends the process where the system refuses it a thread


def kv_bytes_per_block(spec: ModelSpec, *, block_size: int, dtype: Precision) -> int:
    """Bytes that block_size tokens take in the K/V pool, all layers together."""
    return spec.num_layers * block_size * 2 * spec.num_kv_heads * spec.head_dim * _BYTES[dtype]


def free_device_bytes(device: str) -> int | None:
    """Memory that a GPU has free; None where models share the host's. Raises ConfigError as TorchRunner does."""
    chosen = _device(device)
    return torch.cuda.mem_get_info(chosen)[0] if chosen.type == "cuda" else None


class TorchRunner(RunnerBase):
    """A model with its paged K/V pool; fulfils interfaces.Runner.

    weights: float32 arrays under the canonical names (those of Hugging Face's Llama), norms as effective multipliers.
    The output of a pass depends on the batch and the pool alone. float32 is the reference: between two packings of
    the same tokens, logits differ by rounding only.
    max_model_len (None = the model's context) fixes RoPE's frequencies, whatever part of it the pool has room for.
    Raises ConfigError for a length, device, dtype or thread count that cannot be had, CorruptFileError for weights
    that do not fit the spec, CacheError where memory does not hold weights and pool.
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
        super().__init__(
            spec,
            num_blocks=num_blocks,
            block_size=block_size,
            bytes_per_block=kv_bytes_per_block(spec, block_size=block_size, dtype=dtype),
            max_model_len=max_model_len,
        )
        self._device = _device(device)
        if num_threads is not None and num_threads > _MAX_THREADS:
            raise ConfigError(f"num_threads must be at most {_MAX_THREADS}; got {num_threads}.")
        if self._device.type == "cpu":
            torch.set_num_threads(num_threads or usable_cores())
        elif num_threads is not None:
            raise ConfigError(f"num_threads is read on a CPU only; device {device!r} would ignore it: drop it.")
        self._dtype = torch.float32 if dtype == "float32" else torch.bfloat16
        self._attention = AttentionShape(
            num_heads=spec.num_heads,
            block_size=block_size,
            scale=spec.attention_scale,
            softcap=spec.attention_softcap,
        )
        shapes = expected_shapes(spec)
        weight_bytes = sum(map(math.prod, shapes.values())) * _BYTES[dtype]
        unread = 0 if spec.tied_embeddings else math.prod(shapes["model.embed_tokens.weight"])
        self._bytes_read = weight_bytes - unread * _BYTES[dtype]
        pool_bytes = num_blocks * self._kv.bytes_per_block
        with torch.inference_mode():
            smaller = "try bfloat16 or a smaller model" if dtype == "float32" else "try a smaller model"
            with _memory_for(f"a copy of the weights in {dtype}", weight_bytes, remedy=smaller):
                self._decoder = TorchDecoder(
                    spec, weights, max_model_len=self._context, dtype=self._dtype, device=self._device
                )
            with _memory_for("the K/V pool", pool_bytes, remedy="lower kv_cache_memory, max_num_seqs or max_model_len"):
                self._pool = _zeros(
                    (spec.num_layers, num_blocks * block_size, 2, spec.num_kv_heads, spec.head_dim),
                    dtype=self._dtype,
                    device=self._device,
                )

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that a pass reads, counted as if the norms had the matrices' type."""
        return self._bytes_read

    def forward(self, batch: ForwardBatch, sampling: RowSampling | None = None) -> ForwardOutput:
        """One pass; hidden states are torch tensors [T, d] float32. Raises PacelineError where logits are NaN."""
        self._check(batch)
        layers = range(self._spec.num_layers) if batch.layers is None else batch.layers
        with torch.inference_mode():
            plans = {
                window: AttentionPlan(batch, self._pool, self._attention, window=window)
                for window in {self._spec.windows[i] for i in layers}
            }
            logits, hidden = self._decoder.run(
                self._indices(batch.token_ids),
                self._indices(batch.positions),
                slots=self._indices(batch.slots),
                pools=self._pool.flatten(2).unbind(0),
                plans=plans,
                rows=self._indices(batch.logit_rows),
                hidden_layers=batch.hidden_layers,
                layers=layers,
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
        if batch.layers is not None:
            assert set(batch.layers) <= {*range(self._spec.num_layers)}, "layers exist"
            assert list(batch.layers) == sorted(set(batch.layers)), "layers are ascending"


def _within(values: np.ndarray, stop: int) -> bool:
    return len(values) == 0 or bool(values.min() >= 0 and values.max() < stop)


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, ImportError) as error:  # torch asserts where it was built without the device
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"device {name!r} cannot be used ({reason}): try cpu.") from error
    return device


def _zeros(shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros, not empty: blocks are gathered whole, and a NaN in an unused slot would survive its zero weight.

    On a CPU the system hands out zero pages as they are written: a pool takes the memory of what was used of it.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    bits = np.zeros(shape, dtype=np.float32 if dtype == torch.float32 else np.int16)
    return torch.from_numpy(bits).view(dtype)


@contextmanager
def _memory_for(what: str, num_bytes: int, *, remedy: str) -> Iterator[None]:
    """Turns the ways in which NumPy, torch and its devices run out of memory into a CacheError."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:  # torch.OutOfMemoryError is a RuntimeError; a CPU raises plain ones
        if isinstance(error, RuntimeError) and not any(sign in str(error) for sign in ("out of memory", "allocate")):
            raise
        raise CacheError(f"{what} takes {num_bytes:,} bytes, more than the device has free: {remedy}.") from error
