"""The playground in a browser: what it shows is what the API says, by pointer or keyboard, in any scheme and width."""

from __future__ import annotations

import base64
import hashlib
import math
import os
import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from live_server import Live, serving, toy
from paceline.draft.ngram import NgramDrafter
from paceline.draft.suffix import SuffixDrafter

CHROMIUM = shutil.which("chromium")
SCREENSHOTS = Path(__file__).parents[2] / "build" / "playground"
PATIENCE_MS = 120_000  # on a busy machine
ENDED = re.compile("^(Done|Cut off|Stopped)")
LOOKS = {"recovered": "wavy", "bonus": "double", "accepted": "solid"}  # lines under tokens, of the first drafter

pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="the playground's tests need Chromium: apt-get install chromium"
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    sandbox = [] if os.geteuid() else ["--no-sandbox"]  # which root has to do without
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=sandbox)
        expect.set_options(timeout=PATIENCE_MS)
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A page whose script may not fail, nor break its policy; that requests are refused is no failure."""
    page = browser.new_page(viewport={"width": 1280, "height": 860})
    page.set_default_timeout(PATIENCE_MS)
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: message.type == "error" and errors.append(message.text))
    yield page
    page.close()
    assert [error for error in errors if not error.startswith("Failed to load resource")] == []


def visit(page: Page, live: Live, **settings: Any) -> None:
    page.goto(live.url)
    expect(page.locator("#status")).to_have_text("Ready")
    for name, value in {"limit": 60, "seed": 5, **settings}.items():
        page.fill(f"#{name}", str(value))


def send(page: Page, prompt: str) -> None:
    turns = page.locator(".turn")
    before = turns.count()
    page.fill("#prompt", prompt)
    page.press("#prompt", "Enter")
    expect(turns).to_have_count(before + 2)
    expect(page.locator("#status")).to_have_text(ENDED)


def asked(live: Live, *turns: str, **fields: Any) -> dict[str, Any]:
    """What the API answers to the same conversation."""
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(turns)]
    body = {"messages": messages, "max_tokens": 60, "seed": 5, "temperature": 0, **fields}
    return live.post("/v1/chat/completions", json=body).json()


def content(answer: dict[str, Any]) -> str:
    return answer["choices"][0]["message"]["content"]


def tokens(page: Page) -> list[dict[str, str]]:
    """Of the last answer: text, classes and the line under it."""
    return page.locator(".turn:last-child .tok").evaluate_all(
        "all => all.map(e => "
        "({text: e.textContent, looks: e.className, line: getComputedStyle(e).textDecorationStyle}))"
    )


def test_tokens_are_coloured_by_their_origin_as_the_details_say(page, toy_server):
    visit(page, toy_server)
    send(page, "ab ab ab")
    answer = asked(toy_server, "ab ab ab", metrics="detailed")
    steps = [step for step in answer["metrics"]["steps"] if step["tokens"]]
    shown, expected = tokens(page), [token for step in steps for token in step["tokens"]]
    assert "".join(token["text"] for token in shown) == content(answer)
    assert [token["looks"].split()[1] for token in shown] == [token["origin"] for token in expected]
    assert {"accepted", "recovered"} <= {token["origin"] for token in expected}
    for token in shown:
        origin = token["looks"].split()[1]
        assert origin == "plain" or token["line"] == LOOKS[origin]
    summary = answer["metrics"]["speculative_decoding"]
    expect(page.locator("#acceptance")).to_have_text(f"{summary['mean_acceptance_length']:.2f}")
    expect(page.locator("#rate")).to_have_text(f"{100 * summary['draft_acceptance_rate']:.0f} %")


def test_lanes_show_each_node_with_its_fate(page, toy_server):
    visit(page, toy_server)
    send(page, "ab ab ab")
    steps = [step for step in asked(toy_server, "ab ab ab", metrics="detailed")["metrics"]["steps"] if step["tokens"]]
    lanes = page.locator("#lane .step")
    expect(lanes).to_have_count(len(steps))
    for index, step in enumerate(steps):
        fates = [node["fate"] for node in step["nodes"]]
        for fate, looks in (
            ("rejected", ".rejected"),
            ("not reached", ".lost"),
            ("accepted", ":not(.rejected, .lost)"),
        ):
            expect(lanes.nth(index).locator(f".node:not(.final){looks}")).to_have_count(fates.count(fate))
        expect(lanes.nth(index).locator(f".node.final.{step['kind']}")).to_have_count(1 if step["final"] else 0)


def test_pointing_at_a_token_tells_both_probabilities_and_finds_its_lane(page):
    with serving(toy(drafter=SuffixDrafter())) as live:
        visit(page, live)
        send(page, "ab ab ab")
        steps = asked(live, "ab ab ab", metrics="detailed")["metrics"]["steps"]
        number, node = next((i, step["nodes"][step["path"][0]]) for i, step in enumerate(steps) if step["path"])
        page.locator(".turn:last-child .tok.accepted").first.hover()
        expect(page.locator("#tip")).to_be_visible()
        expect(page.locator("#tip")).to_have_text(
            f"{node['text']} accepted, drafted by suffix target’s probability {100 * math.exp(node['logprob']):.1f} % "
            f"drafter’s estimate {100 * node['confidence']:.1f} %"
        )
        expect(page.locator(".step.current .number")).to_have_text(str(number + 1))
        page.locator("h1").hover()
        expect(page.locator("#tip")).not_to_be_visible()


def test_the_conversation_goes_on(page, toy_server):
    visit(page, toy_server, system="be brief")
    read: list[Any] = []  # by the model
    page.on("request", lambda request: request.method == "POST" and read.append(request.post_data_json["messages"]))
    system = {"role": "system", "content": "be brief"}
    first = {"role": "user", "content": "ab ab ab"}
    send(page, first["content"])
    answer = {"role": "assistant", "content": "".join(token["text"] for token in tokens(page))}
    send(page, "and on")
    page.click("#anew")
    send(page, "anew")
    assert read == [
        [system, first],
        [system, first, answer, {"role": "user", "content": "and on"}],
        [system, {"role": "user", "content": "anew"}],
    ]


@pytest.mark.parametrize("temperature", [0, 0.9])
def test_a_race_finds_both_texts_equal(page, toy_server, temperature):
    visit(page, toy_server, temperature=temperature)
    page.fill("#prompt", "ab ab ab")
    page.click("#race")
    expect(page.locator(".verdict")).to_have_text(re.compile(r"^✓ Texts equal .* times as fast.* · seed 5$"))
    texts = page.locator(".runner .text").all_inner_texts()
    plain = content(asked(toy_server, "ab ab ab", temperature=temperature, speculative=False))
    assert texts == [plain, plain]
    page.get_by_role("button", name="Replay").click()
    expect(page.locator(".runner .ahead")).to_have_count(0)


def test_a_race_tells_the_truth_when_it_is_lost(page, toy_server):
    visit(page, toy_server)

    def verdict(plain: str, plain_ms: int, fast: str, fast_ms: int) -> str:
        answers = [{"text": plain, "first": 0, "last": plain_ms}, {"text": fast, "first": 0, "last": fast_ms}]
        return page.evaluate("([a, b]) => judged(a, b, 7).map(part => part.textContent ?? part).join('')", answers)

    assert verdict("abd", 3, "abc", 2).startswith("✗ Texts differ from character 3 on · 1.50 times as fast")
    assert verdict("abc", 3, "ab", 2).startswith("✗ Texts differ from character 3 on")
    assert "0.50 times as fast: speculation lost here" in verdict("abc", 1, "abc", 2)
    assert "too short to measure" in verdict("a", 0, "a", 0)


def test_settings_are_what_is_asked_for(page, toy_server):
    visit(page, toy_server, length=1)
    send(page, "ab ab ab")
    assert page.locator(".step .kept").all_inner_texts() != []
    assert {kept.rpartition("/")[2] for kept in page.locator(".step .kept").all_inner_texts()} <= {"–", "1"}
    page.select_option("#method", "none")
    assert page.get_attribute("#race", "aria-disabled") == "true"
    send(page, "ab ab ab")
    assert {token["looks"].split()[1] for token in tokens(page)} == {"plain"}


@pytest.mark.parametrize(
    "stop",
    [
        pytest.param(lambda page: page.click("#stop"), id="button"),
        pytest.param(lambda page: page.keyboard.press("Escape"), id="key"),
    ],
)
def test_stopping_keeps_what_is_there(page, stop):
    engine = toy(drafter=NgramDrafter(max_ngram=2, min_ngram=1))
    forward, passes, go_on = engine.runner.forward, iter(range(8)), threading.Event()

    def held(*arguments: Any) -> Any:
        if next(passes, None) is None:
            go_on.wait(60)
        return forward(*arguments)

    engine.runner.forward = held
    with serving(engine) as live:
        visit(page, live)
        page.fill("#prompt", "ab ab ab")
        page.press("#prompt", "Enter")
        expect(page.locator(".step")).to_have_count(8)
        stop(page)
        expect(page.locator("#status")).to_have_text(re.compile("^Stopped"))
        go_on.set()
        kept = "".join(token["text"] for token in tokens(page))
        assert content(asked(live, "ab ab ab")).startswith(kept)
        send(page, "and on")
        assert "".join(token["text"] for token in tokens(page)) == content(asked(live, "ab ab ab", kept, "and on"))


def test_the_keyboard_is_enough(page, toy_server):
    visit(page, toy_server)
    page.focus("#prompt")
    keys = page.keyboard
    keys.type("ab ab ab")
    keys.press("Enter")
    expect(page.locator("#status")).to_have_text(ENDED)
    keys.press("Shift+Tab")  # back to the answer
    for _ in range(3):
        keys.press("ArrowRight")
    expect(page.locator(".tok.at")).to_have_count(1)
    expect(page.locator("#tip")).to_have_text(re.compile("target’s probability"))
    keys.press("Escape")
    expect(page.locator("#tip")).not_to_be_visible()
    keys.press("Tab")
    keys.type("cd cd")
    keys.press("Tab")
    keys.press("Tab")
    assert page.evaluate("document.activeElement.id") == "race"
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    keys.press("Enter")
    expect(page.locator(".verdict")).to_have_text(re.compile("^✓ Texts equal"))
    order = []
    for _ in range(10):
        keys.press("Tab")
        order.append(page.evaluate("document.activeElement.id"))
    assert [name for name in order if name] == [
        "stop", "anew", "method", "length", "temperature", "limit", "seed", "system", "lane"
    ]  # fmt: skip


def test_text_is_never_html(page, toy_server):
    visit(page, toy_server)
    send(page, "<b>bold</b><img src=x onerror=alert(1)>")
    assert page.locator("#log :is(b, img)").count() == 0
    expect(page.locator(".turn").first).to_contain_text("<b>bold</b><img src=x onerror=alert(1)>")


def test_an_error_is_shown_and_gives_the_message_back(page, toy_server):
    visit(page, toy_server, limit=0)
    page.fill("#prompt", "ab")
    page.press("#prompt", "Enter")
    expect(page.locator("#status")).to_have_text(re.compile("max_tokens"))
    expect(page.locator("#prompt")).to_have_value("ab")
    page.fill("#limit", "5")
    send(page, "ab")
    assert "".join(token["text"] for token in tokens(page)) == content(asked(toy_server, "ab", max_tokens=5))


def test_a_key_is_asked_for(page):
    with serving(toy(), api_key="secret") as live:
        page.goto(live.url)
        expect(page.locator("#status")).to_have_text(re.compile("an API key is needed"))
        page.fill("#key", "wrong")
        page.press("#key", "Enter")
        expect(page.locator("#status")).to_have_text(re.compile("this API key is wrong"))
        page.fill("#key", "secret")
        page.press("#key", "Enter")
        expect(page.locator("#status")).to_have_text("Ready")
        send(page, "ab")


@pytest.mark.parametrize(
    ("name", "size", "scheme"),
    [("light", (1280, 860), "light"), ("dark", (1280, 860), "dark"), ("narrow", (360, 740), "dark")],
)
def test_nothing_moves_and_nothing_is_cut_off(browser, toy_server, name, size, scheme):
    width, height = size
    page = browser.new_page(
        viewport={"width": width, "height": height}, color_scheme=scheme, reduced_motion="reduce"
    )  # fmt: skip
    visit(page, toy_server)
    page.evaluate(
        "() => { window.moved = 0; new PerformanceObserver(list => list.getEntries().forEach(entry => "
        "{ window.moved += entry.value })).observe({type: 'layout-shift'}) }"
    )
    send(page, "ab ab ab")
    page.fill("#prompt", "cd cd")
    page.click("#race")
    expect(page.locator(".verdict")).to_have_text(re.compile("^✓ Texts equal"))
    assert page.evaluate("window.moved") < 0.01
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    send(page, "ab ab ab")
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SCREENSHOTS / f"{name}.png", full_page=True)
    page.close()


def test_the_browser_may_run_the_page_s_own_script_alone(toy_server):
    response = toy_server.get("/")
    policy = dict(part.split(" ", 1) for part in response.headers["content-security-policy"].split("; "))
    for tag in ("script", "style"):
        [own] = re.findall(f"<{tag}>(.*?)</{tag}>", response.text, re.DOTALL)
        assert policy[f"{tag}-src"] == f"'sha256-{base64.b64encode(hashlib.sha256(own.encode()).digest()).decode()}'"
    assert policy["default-src"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", response.text)  # it works offline


def test_models_say_what_a_request_may_choose(toy_server):
    [model] = toy_server.get("/v1/models").json()["data"]
    assert model["speculation"] == {"methods": ["auto", "ngram", "none"], "num_speculative_tokens": 4, "lossless": True}
    for method in model["speculation"]["methods"]:
        answer = asked(toy_server, "ab", speculative={"method": method})
        assert content(answer) == content(asked(toy_server, "ab", speculative=False))
