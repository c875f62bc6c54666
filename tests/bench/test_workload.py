"""Prompt files: what is read, what is chosen, and one line for each thing that is wrong."""

from __future__ import annotations

import json

import pytest

from paceline.bench.workload import Prompt, read_prompts, select
from paceline.errors import ConfigError

LINE = {"id": "a", "category": "chat", "turns": ["Hello", "And then?"], "source": "somewhere"}


def write(tmp_path, *lines) -> str:
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        "\n".join(line if isinstance(line, str) else json.dumps(line, ensure_ascii=False) for line in lines),
        encoding="utf-8",
    )
    return str(path)


def test_reads_lines_and_skips_blank_ones(tmp_path):
    prompts = read_prompts(write(tmp_path, LINE, "", LINE | {"id": 7, "turns": ["héllo\u2028there"]}))
    assert prompts == [Prompt("a", "chat", ("Hello", "And then?")), Prompt("7", "chat", ("héllo\u2028there",))]
    assert prompts[0].messages == [{"role": "user", "content": "Hello"}]


def test_reads_the_files_of_known_benchmarks(tmp_path):
    """Spec-Bench numbers its questions, SPEED-Bench names them; both add fields that are of no use here."""
    lines = [
        {"question_id": 81, "category": "writing", "turns": ["Compose a post.", "Rewrite it."], "reference": []},
        {"question_id": "coding_1", "category": "coding", "sub_category": "x", "turns": ["Sort."], "multiturn": False},
    ]
    assert [prompt.id for prompt in read_prompts(write(tmp_path, *lines))] == ["81", "coding_1"]


def test_reads_past_a_byte_order_mark(tmp_path):
    (tmp_path / "bom").write_bytes(b"\xef\xbb\xbf" + json.dumps(LINE).encode())
    assert [prompt.id for prompt in read_prompts(str(tmp_path / "bom"))] == ["a"]


@pytest.mark.parametrize(
    ("lines", "complaint"),
    [
        ([], "holds no prompts"),
        (["", " "], "holds no prompts"),
        ([LINE, "{not json}"], "line 2 is not valid JSON"),
        (["[1]"], "line 1 is not a JSON object"),
        (['{"id": "a", "turns": ["x"]}'], "line 1 has no 'category'"),
        ([LINE | {"turns": []}], "needs turns"),
        ([LINE | {"turns": "Hello"}], "needs turns"),
        ([LINE | {"turns": [""]}], "needs turns"),
        ([LINE, LINE], "more than once"),
        ([LINE, "[" * 100_000], "line 2 is not valid JSON"),
        ([LINE, '{"id": ' + "9" * 5000 + "}"], "line 2 is not valid JSON"),
        ([LINE | {"id": ["a"]}], "line 1 needs id and category as text or a number"),
        *(([json.dumps(LINE | {name: "x\ud800"})], "line 1 holds half a surrogate") for name in ("id", "category")),
        ([json.dumps(LINE | {"turns": ["x\ud800"]})], "line 1 holds half a surrogate"),
    ],
)
def test_bad_lines(tmp_path, lines, complaint):
    with pytest.raises(ConfigError, match=complaint) as caught:
        read_prompts(write(tmp_path, *lines))
    assert "\n" not in str(caught.value)


def test_unreadable_files(tmp_path):
    with pytest.raises(ConfigError, match="cannot read the prompt file"):
        read_prompts(str(tmp_path / "absent.jsonl"))
    with pytest.raises(ConfigError, match="cannot read the prompt file"):
        read_prompts(str(tmp_path))
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="UTF-8"):
        read_prompts(str(tmp_path / "binary"))


PROMPTS = [Prompt(f"{category}{i}", category, ("x",)) for i in range(3) for category in ("chat", "code")]


def ids(prompts):
    return [prompt.id for prompt in prompts]


def test_select():
    assert select(PROMPTS) == PROMPTS
    assert ids(select(PROMPTS, per_category=1)) == ["chat0", "code0"]
    assert ids(select(PROMPTS, limit=3)) == ["chat0", "code0", "chat1"]
    assert ids(select(PROMPTS, categories=["code"], per_category=2)) == ["code0", "code1"]
    assert ids(select(PROMPTS, per_category=2, limit=3)) == ["chat0", "code0", "chat1"]


def test_select_refuses():
    with pytest.raises(ConfigError, match=r"no prompt has the category 'poems'; the file has chat, code"):
        select(PROMPTS, categories=["poems"])
    with pytest.raises(ConfigError, match="--limit must be at least 1; got 0"):
        select(PROMPTS, limit=0)
    with pytest.raises(ConfigError, match="--per-category must be at least 1; got -1"):
        select(PROMPTS, per_category=-1)
