"""The whole extension surface: what a runner, a drafter, a verifier and a controller promise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from paceline.types import Draft, ForwardBatch, ForwardOutput, Load, Observation, RequestView, RowSampling, Verdict


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The paged K/V pool that a runner holds. Slot s is place s % block_size of block s // block_size."""

    num_blocks: int
    block_size: int
    bytes_per_block: int


class Runner(Protocol):
    """A model with its K/V pool. Target and draft models are both runners."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_model_len(self) -> int:
        """Tokens that one sequence may hold: the context the model was trained for, or the user's lower limit."""
        ...

    @property
    def kv(self) -> KVLayout: ...

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that a pass reads: all of them, of an embedding that is not the head too only a few rows."""
        ...

    def forward(self, batch: ForwardBatch, sampling: RowSampling | None = None) -> ForwardOutput:
        """One pass: writes the K/V of every token to its slot and samples the wanted rows; without sampling, logits."""
        ...

    def move(self, src_slots: np.ndarray, dst_slots: np.ndarray) -> None:
        """Copies K/V between slots [K] int64; all sources are read before any destination is written."""
        ...


class Tokenizer(Protocol):
    """Text to token ids and back, and the way a chat becomes text."""

    @property
    def eos_ids(self) -> frozenset[int]:
        """All tokens that end a text."""
        ...

    @property
    def special_ids(self) -> frozenset[int]:
        """Tokens that are no text: they steer the model."""
        ...

    @property
    def has_chat_template(self) -> bool: ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str: ...

    def token_text(self, token_id: int) -> str:
        """The text of one token, of a special one its name."""
        ...

    def token_bytes(self) -> list[bytes | None]:
        """What each token adds to a text; None for special tokens and unused ids."""
        ...

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """tools: descriptions of functions, where the template reads them; variables: what else it may name."""
        ...

    @property
    def template_reads_tools(self) -> bool:
        """Whether render_chat can show tools to the model."""
        ...

    def template_mentions(self, text: str) -> bool:
        """Whether the chat template writes or looks for a text, such as a tag."""
        ...


class Noise(Protocol):
    """The random words of one request and choice (docs/noise.md). Stateless: any word in any order."""

    def uniforms(self, *, position: int, purpose: int, attempt: int, vocab_size: int) -> np.ndarray:
        """u in (0, 1) of every token: [V] float64."""
        ...

    def uniform(self, *, position: int, purpose: int, attempt: int) -> float:
        """One u in (0, 1), the word of token 0: a coin."""
        ...


class Drafter(Protocol):
    """Guesses what comes next. Cannot alter the text, only how fast it comes.

    Derive from it and write `propose`; `observe`, `release` and `close` do nothing unless they are written, too.
    Speculation finds it as method "package.module:Class", or by an entry point of the group `paceline.drafters`
    (docs/drafters.md).
    """

    name: str = ""  # in metrics and messages; every drafter has one
    hidden_layers: tuple[int | str, ...] = ()  # layers of the target whose hidden states `observe` wants
    note: str = ""  # what people should know of it, for the model card
    num_successors: int = 0  # best next tokens of each sampled row that `observe` wants
    serial: bool = False  # each node of a chain takes about as long as the one before it, as passes of a model do
    remembers: bool = False  # what it drafts for a request depends on others before it
    catches_up: bool = False  # the views that it is asked with tell it enough: other steps may go unseen

    @property
    def members(self) -> tuple[str, ...]:
        """Names of the drafters of which a request may choose one: those of a hybrid, or the drafter itself."""
        return (self.name,)

    def propose(self, views: Sequence[RequestView], budgets: Sequence[int]) -> list[Draft | None]:
        """One draft of at most budgets[i] >= 1 nodes for each view, or None where there is nothing to guess.

        A drafter that runs layers of the target reads the K/V of the first `num_computed` tokens through a view's
        `block_table`. The keys after them, as many as tokens are pending plus budgets[i], lie in blocks that are this
        request's alone: it may write there, as the target's pass does after it, over whatever it finds.
        """
        ...

    def consult(self, controller: Controller) -> None:
        """Told before anything else, and when the controller changes: where there are several drafters behind this
        one, the controller says how many nodes each is asked for, and is told how long it took."""

    def observe(self, step: Observation) -> None:
        """Told of each step; if it catches up, only of those in which it was asked for a draft. A hybrid's members are
        told of its draft, in which `proposers` names theirs."""

    def release(self, request_id: str) -> None:
        """The request is over or preempted, or this drafter failed in its step: forget what was kept for it."""

    def close(self) -> None:
        """The LLM is closed: save what is to be kept. Called again if it raised."""


class Verifier(Protocol):
    """Decides which nodes of a draft are kept, and which token follows them."""

    lossless: bool  # the emitted tokens follow the target's law exactly
    needs_laws: bool  # rows are laws [N+1, V] float64 rather than sampled tokens [N+1]
    chains_only: bool  # drafts must be trees of width one

    def verify(self, draft: Draft, rows: np.ndarray, noise: Noise, *, position: int, attempt: int) -> Verdict:
        """Row 0 belongs to the root, row i + 1 to node i. `position` is the index of the first token to be decided."""
        ...


class Controller(Protocol):
    """Decides how many nodes each request may draft in a step, and which of them are verified."""

    fixed: bool  # what it decides depends on settings alone, not on clocks or on other requests

    @property
    def least_reach(self) -> float:
        """The chance to be reached, by drafters' claims, below which no node is worth offering in this step."""
        ...

    def plan(self, views: Sequence[RequestView], limits: Sequence[int], load: Load) -> list[int]:
        """Nodes for each request, at most its limit; 0 = it is not asked, and decodes plainly. load: the pass without
        drafts."""
        ...

    @property
    def rest(self) -> int:
        """Steps after one that was planned without drafts for which the plan would be the same, so long as no request
        comes or goes: it need not be made."""
        ...

    def budgets(
        self, drafter: Drafter, views: Sequence[RequestView], limits: Sequence[int], drafts: Sequence[Sequence[Draft]]
    ) -> list[int]:
        """Nodes that one of several drafters is asked for, at most the limit of each request; 0 = it is not asked.
        drafts: of those that answered before it."""
        ...

    def drafted(
        self, drafter: Drafter, views: Sequence[RequestView], drafts: Sequence[Draft | None], *, seconds: float
    ) -> None:
        """That drafter's answer to its budgets, for those requests of which it was asked for any, took so long."""
        ...

    def select(
        self, views: Sequence[RequestView], drafts: Sequence[Draft | None], load: Load, *, seconds: float
    ) -> list[Draft | None]:
        """What is verified of the drafts of those that were asked, which took `seconds`: of one without a law some
        nodes with their parents or None, of one with a law all or None."""
        ...

    def observe(self, step: Observation) -> None:
        """Told of each step in which anybody was asked for a draft."""
        ...

    def passed(self, load: Load, seconds: float) -> None:
        """Told of each step in which nobody was and nothing was drafted, before the next plan. seconds: of the pass."""
        ...

    def release(self, request_id: str) -> None:
        """The request is over or preempted."""
        ...
