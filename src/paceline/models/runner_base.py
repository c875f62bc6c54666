"""What every runner of a model says of itself."""

from __future__ import annotations

from paceline.errors import ConfigError
from paceline.interfaces import KVLayout
from paceline.models.architecture import ModelSpec


class RunnerBase:
    """A model of a certain context over a K/V pool of a certain shape; the runners add how a pass runs.

    max_model_len: None = the model's context. Raises ConfigError for one beyond it.
    """

    def __init__(
        self, spec: ModelSpec, *, num_blocks: int, block_size: int, bytes_per_block: int, max_model_len: int | None
    ) -> None:
        if max_model_len is not None and max_model_len > spec.context_length:
            raise ConfigError(
                f"max_model_len must be at most the model's context of {spec.context_length}; got {max_model_len}: "
                "lower it."
            )
        self._spec = spec
        self._context = max_model_len or spec.context_length  # whatever part of it the pool has room for
        self._max_model_len = min(self._context, num_blocks * block_size)
        self._kv = KVLayout(num_blocks=num_blocks, block_size=block_size, bytes_per_block=bytes_per_block)

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
        """Tokens that one sequence may hold: the context, or the pool where that is smaller."""
        return self._max_model_len

    @property
    def kv(self) -> KVLayout:
        """Shape of the K/V pool."""
        return self._kv
