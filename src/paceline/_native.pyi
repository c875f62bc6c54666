"""The native CPU engine, compiled from native/. Absent where the package was installed without a C++ compiler."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from paceline.draft.successor_rows import Seen
from paceline.types import RowSampling

def version() -> str:
    """Version of the package that this extension was built with."""

def read_bandwidth(num_threads: int, num_bytes: int) -> float:
    """GB/s that the threads together read from a buffer of num_bytes. Raises MemoryError."""

class PackedMatrix:
    """A weight matrix [outputs, inputs] as the kernels read it. Formats: native/format.hpp."""

    @property
    def format(self) -> str: ...
    @property
    def outputs(self) -> int: ...
    @property
    def inputs(self) -> int: ...
    def unpack(self) -> np.ndarray:
        """float32 [outputs, inputs]."""

def pack_ggml(
    type_name: str, blocks: np.ndarray, outputs: int, inputs: int, row_order: np.ndarray | None = None
) -> PackedMatrix:
    """Rows of GGUF's blocks (uint8, one after another), exactly; output i is row row_order[i] (int32).

    Raises ValueError for values that are not finite or sizes that do not fit.
    """

def pack_floats(values: np.ndarray, format: str) -> PackedMatrix:
    """float32 [outputs, inputs] rounded to f32, f16, bf16, i8 (a scale for each output) or q4_1.

    Raises ValueError for values that are not finite or an unsuitable format.
    """

def packed_format(type_name: str) -> str:
    """Name of the format that holds the values of a GGUF type."""

class Model:
    """A model with its K/V pool; models/native_runner.py describes it to the constructor and is its only caller."""

    def __init__(self, spec: dict[str, Any], num_threads: int, isa: str) -> None:
        """An empty isa is the best that the machine has.

        Raises ValueError for an unknown isa and for weights that do not fit, MemoryError.
        """

    def forward(
        self,
        *,
        token_ids: np.ndarray,
        positions: np.ndarray,
        slots: np.ndarray,
        query_starts: np.ndarray,
        context_lengths: np.ndarray,
        block_tables: list[np.ndarray],
        ancestors: list[np.ndarray | None],
        logit_rows: np.ndarray,
        layers: np.ndarray,
        hidden_layers: np.ndarray,
        sampling: RowSampling | None,
        want_logits: bool,
    ) -> tuple[np.ndarray | None, dict[str, np.ndarray] | None, dict[int, np.ndarray]]:
        """Logits [M, V], what sample_rows returns, hidden states [T, d] by layer; num_layers + 1 = after the norm.

        Arrays as in types.ForwardBatch, and both lists of layers int32. Raises ValueError for what does not fit.
        """

    def move(self, sources: np.ndarray, destinations: np.ndarray) -> None:
        """Copies K/V between slots [K] int64; all sources are read before any destination is written."""

    @property
    def weight_bytes(self) -> int: ...
    @property
    def isa(self) -> str: ...

class SuffixAutomaton:
    """Does what draft.automaton.SuffixAutomaton does. Raises IndexError and ValueError for what does not fit."""

    def __init__(self, *, max_length: int) -> None: ...
    @property
    def max_length(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def num_states(self) -> int: ...
    def length(self, state: int) -> int: ...
    def count(self, state: int) -> int: ...
    def num_followed(self, state: int) -> int: ...
    def target(self, state: int, token: int) -> int: ...
    def longest_suffix(self, state: int) -> tuple[int, int]: ...
    def shorten(self, state: int, length: int, *, to: int) -> tuple[int, int]: ...
    def repeated_suffix(self) -> tuple[int, int]: ...
    def find_suffix(self, tokens: Sequence[int]) -> tuple[int, int]: ...
    def followers(self, state: int, *, limit: int) -> list[tuple[int, int, int, int]]: ...
    def grow(
        self, state: int, length: int, num_nodes: int, *, min_probability: float, chain: bool
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, float]: ...
    def extend(self, tokens: Sequence[int]) -> None: ...

class SuccessorRows:
    """Does what draft.successor_rows.SuccessorRows does. Raises ValueError for what does not fit."""

    def __init__(
        self, successors: np.ndarray, kinds: np.ndarray, keys: np.ndarray, hits: np.ndarray, trials: np.ndarray
    ) -> None: ...
    @property
    def rates(self) -> list[list[float]]: ...
    def look(self, before: int, token: int) -> tuple[list[int], int]: ...
    def grow(
        self, before: int, root: int, budget: int, *, least_reach: float, chain: bool
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]: ...
    def learn(self, step: list[Seen]) -> None: ...
    def count(self, before: int, token: int, following: int) -> None: ...

def sample_rows(logits: np.ndarray, sampling: RowSampling, isa: str = "") -> dict[str, np.ndarray]:
    """Samples rows of logits [M, V] float32 as sampling.sampler.sample_rows does.

    token_ids [M] int32, -1 where all_banned or has_nan ([M] bool; NaN or +inf among the raw logits) say why; token,
    rank, top_ids and top of types.Logprobs where num_logprobs is not None; successors [M, k] where num_successors > 0,
    candidates and candidate_scores [M, k] where num_candidates > 0. Raises ValueError for arrays that do not fit and
    for an unknown isa.
    """

def row_words(num_groups: int, *, seed: int, stream: int, position: int, purpose: int, isa: str = "") -> np.ndarray:
    """Random words of the tokens 0 .. 32 * num_groups - 1 of a row: uint32. The vector kernel, for tests."""

def philox4x32(counter: Sequence[int], key: int) -> list[int]:
    """One block of Philox-4x32-10: four words. The scalar code, for tests."""
