"""Which of a draft model's tokens are tokens of the target as well, and how much of a text they make up.

TLI of Timor et al., "Accelerating LLM inference with lossless speculative decoding algorithms for heterogeneous
vocabularies" (ICML 2025): a drafter of another vocabulary samples from the tokens that both have.
"""

from __future__ import annotations

import numpy as np

from paceline.interfaces import Tokenizer
from paceline.types import TokenMap

# English, markup, code, numbers and some other languages: what a target is commonly asked to write.
SAMPLE_TEXT = '''\
The committee met on Tuesday to discuss the new library. "We have waited for twelve years," said its director, Anna
Lindqvist, "and we're not going to wait for another one." The plans, which were published in March 2021, show a building
of three floors; it will cost about $4.5 million, 20% less than was expected.

### How to install it
1. Download the archive and unpack it: `tar -xzf tool.tar.gz`
2. Set the **path** in `config.json`.

| Name | Value |
|------|-------|
| size | 1024  |

To solve 3x + 7 = 22, subtract 7 from both sides: 3x = 15. Therefore, x = 15 / 3 = 5.

```python
import os
from typing import List

class Counter:
    """Counts words in a list of files."""

    def __init__(self, names: List[str]) -> None:
        self.names = names
        self.counts = {}

    def count(self, minimum=1):
        for name in self.names:
            with open(os.path.join("data", name)) as file:
                for word in file.read().split():
                    if len(word) >= minimum and word not in self.counts:
                        self.counts[word] = 0
                    self.counts[word] += 1
        return sorted(self.counts.items(), key=lambda item: item[1], reverse=True)


if __name__ == "__main__":
    print(Counter(["a.txt", "b.txt"]).count(minimum=3)[:10])
```

```javascript
const total = items.filter((item) => item.price > 0).reduce((sum, item) => sum + item.price, 0);
```
Le conseil se réunit à Genève. Der Ausschuss trifft sich am Dienstag. El comité se reúne mañana.
'''


def map_tokens(target: Tokenizer, own: Tokenizer, *, target_size: int, own_size: int) -> TokenMap:
    """The target's id of each of the draft model's tokens.

    Two tokens are the same if they add the same bytes to a text. Special tokens have no counterpart, whatever they are
    called, but for those that end a text in both models and have one name.
    """
    theirs = {spelling: i for i, spelling in enumerate(target.token_bytes()[:target_size]) if spelling}
    ids = np.full(own_size, -1, dtype=np.int32)
    for own_id, spelling in enumerate(own.token_bytes()[:own_size]):
        if spelling:
            ids[own_id] = theirs.get(spelling, -1)
    for own_id, target_id in special_pairs(target, own).items():
        if own_id in own.eos_ids and target_id in target.eos_ids:
            ids[own_id] = target_id
    return TokenMap(ids, target_size)


def special_pairs(target: Tokenizer, own: Tokenizer) -> dict[int, int]:
    """The draft model's special tokens that have the name of one of the target's, whose id is the value."""
    theirs = {target.token_text(i): i for i in target.special_ids}
    return {i: theirs[name] for i in own.special_ids if (name := own.token_text(i)) in theirs}


def coverage(text: str, target: Tokenizer, token_map: TokenMap) -> float:
    """Share of the tokens in which the target spells a text that the draft model has, too."""
    ids = target.encode(text, add_special_tokens=False)
    return float(np.isin(ids, token_map.ids).mean())
