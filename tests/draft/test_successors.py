"""SuccessorTable against dictionaries that do the same one row at a time, and its file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from killing import kill_while_writing
from paceline.draft.successors import SuccessorTable
from paceline.errors import ConfigError

V, WIDTH = 12, 4
UNKNOWN = [-1] * WIDTH


def table(**options: int) -> SuccessorTable:
    return SuccessorTable(**{"vocab_size": V, "width": WIDTH, **options})


def write(own: SuccessorTable, before: int, token: int, successors: list[int]) -> None:
    own.write(np.array([before]), np.array([token]), np.array([successors], dtype=np.int32))


rows = st.lists(
    st.tuples(st.integers(-1, V - 1), st.integers(0, V - 1), st.permutations(range(V)).map(lambda p: p[:WIDTH])),
    min_size=1,
    max_size=20,
)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.lists(rows, min_size=1, max_size=4))
def test_holds_the_latest_row_of_each_pair_and_of_each_token(passes):
    own, pairs, tokens = table(), {}, {}
    for written in passes:
        before, token, successors = zip(*written, strict=True)
        own.write(np.array(before), np.array(token), np.array(successors, dtype=np.int32))
        pairs |= {(b, t): s for b, t, s in written}
        tokens |= {t: s for _, t, s in written}
        for b in range(-1, V):
            for t in range(V):
                assert own.rows.look(b, t)[0] == pairs.get((b, t), tokens.get(t, UNKNOWN))


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 3), max_size=30), rows)
def test_what_follows_in_a_text_comes_first(text, written):
    own = table()
    for row in written:
        write(own, *row)
    known = {(b, t): own.rows.look(b, t)[0] for b in range(-1, V) for t in range(V)}
    own.read_text(np.array(text, dtype=np.int32))
    last = {(b, t): f for b, t, f in zip(text, text[1:], text[2:], strict=False)}
    for (b, t), following in last.items():
        others = [token for token in known[b, t] if token != following]
        assert own.rows.look(b, t)[0] == [following, *others][:WIDTH]


def test_a_row_knows_whether_its_best_successor_was_so_before():
    own = table()
    write(own, 1, 2, [5, 6, 7, 8])
    first = own.rows.look(1, 2)[1]
    write(own, 1, 2, [5, 8, 7, 6])
    confirmed = own.rows.look(1, 2)[1]
    write(own, 1, 2, [6, 5, 7, 8])
    changed = own.rows.look(1, 2)[1]
    of_the_token = own.rows.look(0, 2)[1]
    assert len({first, confirmed, changed, of_the_token}) == 4


def test_a_pair_takes_the_place_of_another_and_begins_anew():
    own = table(vocab_size=1 << 18)
    write(own, 3, 1, [5, 6, 7, 8])
    write(own, 3, 1, [5, 6, 7, 8])
    write(own, 3, 1 + (1 << 16), [5, 0, 1, 2])  # falls on the same place
    assert own.rows.look(3, 1 + (1 << 16)) == ([5, 0, 1, 2], table().rows.look(0, 0)[1] - 3)
    assert own.rows.look(3, 1)[0] == [5, 6, 7, 8]  # the token's


def test_rates_are_what_came_true():
    own = table()
    write(own, 1, 2, [5, 6, 7, 8])
    kind = own.rows.look(1, 2)[1]
    for following in [5] * 600 + [6] * 300 + [0] * 100:
        own.rows.count(1, 2, following)
    assert own.rows.rates[kind] == pytest.approx([0.6, 0.3, 0, 0], abs=0.01)
    assert all(rates == table().rows.rates[0] for other, rates in enumerate(own.rows.rates) if other != kind)
    for _ in range(10_000):
        own.rows.count(1, 2, 5)
    assert max(map(max, own.rows.rates)) < 1


def test_a_place_where_nothing_is_known_is_not_counted():
    own = table()
    own.rows.count(1, 2, 5)
    assert own.rows.rates == table().rows.rates


def filled(path: Path) -> SuccessorTable:
    own = table()
    own.read_text(np.random.default_rng(0).integers(0, V, 100, dtype=np.int32))
    own.rows.count(1, 2, 5)
    own.save(path, fingerprint="abc")
    return own


def test_a_file_gives_the_table_back(tmp_path):
    own, other = filled(tmp_path / "table.npz"), table()
    other.load(tmp_path / "table.npz", fingerprint="abc")
    assert all(own.rows.look(b, t) == other.rows.look(b, t) for b in range(V) for t in range(V))
    assert own.rows.rates == other.rows.rates
    assert [path.name for path in tmp_path.iterdir()] == ["table.npz"]


def test_a_file_of_another_vocabulary_or_tokenizer_is_refused(tmp_path):
    filled(tmp_path / "table.npz")
    with pytest.raises(ConfigError, match=r"must hold successors of shape .* delete it"):
        table(vocab_size=V + 1).load(tmp_path / "table.npz", fingerprint="abc")
    with pytest.raises(ConfigError, match="tokenizer"):
        table().load(tmp_path / "table.npz", fingerprint="abd")


def test_a_damaged_file_is_refused_and_the_table_stays_as_it_is(tmp_path):
    filled(tmp_path / "table.npz")
    whole = (tmp_path / "table.npz").read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    method = bytearray(whole)
    method[whole.index(b"PK\x01\x02") + 10] = 99  # a compression that nobody knows
    contents = (b"", b"nothing of the kind", whole[: len(whole) // 2], flipped, method, b"\x93NUMPY" + whole)
    path, own = tmp_path / "damaged.npz", table()
    for content in contents:
        path.write_bytes(content)
        with pytest.raises(ConfigError, match="delete it"):
            own.load(path, fingerprint="abc")
    np.save(tmp_path / "array.npy", np.zeros(3))
    with pytest.raises(ConfigError, match="delete it"):
        own.load(tmp_path / "array.npy", fingerprint="abc")
    assert own.rows.look(0, 0)[0] == UNKNOWN


def test_a_file_with_tokens_beyond_the_vocabulary_is_refused(tmp_path):
    filled(tmp_path / "table.npz")
    with np.load(tmp_path / "table.npz") as file:
        arrays = dict(file)
    arrays["successors"][-1, 0] = V
    np.savez(tmp_path / "table.npz", **arrays)
    with pytest.raises(ConfigError, match="other values"):
        table().load(tmp_path / "table.npz", fingerprint="abc")


def test_a_file_that_cannot_be_written_is_one_clear_error(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError, match="cannot be written"):
        table().save(tmp_path / "folder", fingerprint="")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_killed_while_saving(tmp_path):
    path = tmp_path / "table.npz"
    own = table()
    own.save(path, fingerprint="abc")
    for _ in kill_while_writing(lambda count: own.save(path, fingerprint="abc"), folder=tmp_path, scratch="*.partial"):
        table().load(path, fingerprint="abc")
