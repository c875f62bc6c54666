"""A drafter around another one: what it does not write itself is passed on."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.interfaces import Controller, Drafter
from paceline.types import Draft, Observation, RequestView


class DrafterWrapper(Drafter):
    """Base of drafters that change something of another one, whose declarations are theirs."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.name = drafter.name
        self.hidden_layers = drafter.hidden_layers
        self.note = drafter.note
        self.num_successors = drafter.num_successors
        self.serial = drafter.serial
        self.remembers = drafter.remembers
        self.catches_up = drafter.catches_up

    @property
    def members(self) -> tuple[str, ...]:
        return self.drafter.members

    def propose(self, views: Sequence[RequestView], budgets: Sequence[int]) -> list[Draft | None]:
        return self.drafter.propose(views, budgets)

    def consult(self, controller: Controller) -> None:
        self.drafter.consult(controller)

    def observe(self, step: Observation) -> None:
        self.drafter.observe(step)

    def release(self, request_id: str) -> None:
        self.drafter.release(request_id)

    def close(self) -> None:
        self.drafter.close()
