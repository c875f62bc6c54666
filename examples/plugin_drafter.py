"""A drafter of your own: each token will be followed by whatever followed it last, in any request so far.

usage: python examples/plugin_drafter.py MODEL PROMPT
"""

import itertools
import sys

from paceline import LLM
from paceline.interfaces import Drafter
from paceline.types import Draft


class LastFollower(Drafter):
    name = "last_follower"
    catches_up = True  # it reads what it has not seen when it is asked

    def __init__(self, *, max_length=8):
        self._max_length = max_length
        self._follower = {}  # token -> the one that followed it last
        self._num_read = {}  # request -> its tokens that have a follower already

    def propose(self, views, budgets):
        return [self._draft(view, min(budget, self._max_length)) for view, budget in zip(views, budgets, strict=True)]

    def _draft(self, view, budget):
        unread = view.token_ids[self._num_read.get(view.request_id, 0) :].tolist()
        self._follower.update(itertools.pairwise(unread))
        self._num_read[view.request_id] = len(view.token_ids) - 1
        chain = [unread[-1]]
        while len(chain) <= budget and chain[-1] in self._follower:
            chain.append(self._follower[chain[-1]])
        return Draft.chain(chain[1:], source=self.name)

    def release(self, request_id):
        self._num_read.pop(request_id, None)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python examples/plugin_drafter.py MODEL PROMPT")
    model, prompt = sys.argv[1:]
    llm = LLM(model, speculation={"method": "plugin_drafter:LastFollower", "options": {"max_length": 4}})
    [output] = llm.generate(prompt)
    print(output.text, llm.metrics(), sep="\n")
