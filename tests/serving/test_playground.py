"""The playground in a real browser, headless, under the policy that the server sends."""

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from serving import live
from serving.fake_server import (
    CSP,
    HOSTILE,
    NUM_REASONING,
    TOKENS,
    WIDE,
    State,
    make_app,
    running,
    script,
)
from serving.live import HTTP, LiveServer
from tests.browsing import Pages, grave

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
expect = sync_api.expect

PROPOSERS = ["plain", "eagle3", "peagle"]
PAIR2 = Path(__file__).parents[1] / "fixtures" / "pair2"
MARKS = """column => [...column.querySelectorAll('.output .token')]
    .map(token => [token.textContent, token.classList.contains('draft')])"""
# Counts the refused drafts that were shown and the batches in which tokens came.
WATCH_OUTPUT = """() => {
    window.seen = {ghosts: 0, batches: 0};
    const count = records => {
        const added = records.flatMap(record => [...record.addedNodes]).map(node => node.className);
        seen.ghosts += added.filter(name => name === 'ghosts').length;
        seen.batches += added.some(name => name.includes?.('token'));
    };
    for (const output of document.querySelectorAll('.output'))
        new MutationObserver(count).observe(output, {childList: true, subtree: true});
}"""


@dataclass
class Site:
    """A server with the playground, and what the fake one saw."""

    url: str
    state: State | None = None


@pytest.fixture(scope="module")
def fake_site() -> Iterator[Site]:
    state = State()
    with running(make_app(state)) as url:
        yield Site(url, state)


@pytest.fixture
def fake(fake_site: Site) -> Site:
    """The fake server, with nothing remembered."""
    assert fake_site.state is not None
    vars(fake_site.state).update(vars(State()))
    return fake_site


@pytest.fixture
def real_site(server: LiveServer) -> Site:
    return Site(server.url)


@pytest.fixture
def site(request: pytest.FixtureRequest) -> Site:
    """A server that has the playground, the fake one unless a test names both."""
    return request.getfixturevalue(getattr(request, "param", "fake_site"))


both_sites = pytest.mark.parametrize("site", ["fake_site", "real_site"], indirect=True)


@pytest.fixture
def visit(pages: Pages) -> Iterator[Callable[..., Any]]:
    """visit(site, chat=False, **context options): the loaded page; it keeps nothing of the test
    before. Chat is switched on or off, or with None stays as the page has it.

    At the end of the test no page may have written an error or broken the policy; `page.problems`
    can be emptied by a test that expects some.
    """
    used = []

    def watch(page: Any) -> None:
        page.on("dialog", lambda dialog: page.problems.append(f"dialog: {dialog.message}"))
        page.on(
            "console",
            lambda line: line.type in ("error", "warning") and page.problems.append(line.text),
        )

    def open_page(site: Site, *, chat: bool | None = False, **options: Any) -> Any:
        page = pages.open(watch, options)
        used.append(page)
        page.goto(site.url)
        wait_until(page, "document.querySelector('#run:enabled')")
        wait_until(page, "document.querySelector('.column')?.checkVisibility()")
        if chat is not None and chat != page.locator("#chat").is_checked():
            page.locator("#chat").evaluate("box => box.click()")  # without moving the focus
        return page

    yield open_page
    problems = [page.problems for page in used]
    for page in used:
        page.unroute_all()
        page.goto("about:blank")  # ends its requests
    assert not any(problems), problems


def wait_until(page: Any, condition: str, timeout_s: float = 15) -> None:
    """Until JavaScript is true. Playwright's own `expect` looks once a second, after a while."""
    page.evaluate(
        """([condition, seconds]) => new Promise((done, fail) => {
            const end = Date.now() + 1000 * seconds;
            const look = () => (CONDITION) ? done() : Date.now() < end ? setTimeout(look, 10)
                : fail(new Error(`waited ${seconds} s in vain: ${condition}`));
            look();
        })""".replace("CONDITION", condition),
        [condition, timeout_s],
    )


def column(page: Any, name: str) -> Any:
    return page.locator(f"[data-proposer={name}]")


def only(page: Any, name: str) -> Any:
    """Switch all other columns off: the column."""
    for other in page.locator(".column").all():
        other.locator(".on").set_checked(other.get_attribute("data-proposer") == name)
    return column(page, name)


def start(page: Any, prompt: str) -> None:
    page.locator("#prompt").fill(prompt)
    page.locator("#run").click()


def finish(page: Any) -> None:
    wait_until(page, "document.querySelector('#run:enabled')", 60)


def run(page: Any, prompt: str) -> None:
    start(page, prompt)
    finish(page)


def answer(column: Any) -> str:
    """The prompt and the text, once the refused drafts are gone."""
    wait_until(column.page, "!document.querySelector('.ghosts')", 3)
    return column.locator(".output").text_content()


def counts(column: Any) -> str:
    return column.locator(".counts").inner_text()


def stat(column: Any, name: str) -> str:
    return column.locator(f"[data-stat={name}]").inner_text()


def until(condition: Callable[[], bool], page: Any) -> None:
    deadline = time.monotonic() + 15
    while not condition():
        assert time.monotonic() < deadline, "waited 15 seconds in vain"
        page.wait_for_timeout(20)


# ---- any server ----


@both_sites
def test_tokens_arrive_one_after_another(site: Site, visit):
    page = visit(site)
    page.locator("#max-tokens").fill("40")
    start(page, "def add(a, b):")
    tokens = page.locator(".output").first.locator(".token")
    tokens.first.wait_for(state="attached")
    early = tokens.count()
    until(lambda: tokens.count() > early, page)
    finish(page)
    for output in page.locator(".column").all():
        assert output.locator(".token").count() >= 1
        assert float(stat(output, "rate")) > 0
    assert page.locator("#speed-chart polyline").count() == page.locator(".column").count()
    assert "tokens/s" in page.locator("#summary").inner_text()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious(site: Site, visit, scheme):
    page = visit(site, chat=True, color_scheme=scheme)
    # What is just fading out cannot keep its contrast; it is hidden from screen readers.
    violations = partial(grave, page, [".ghosts.fading"])

    assert violations() == []
    page.locator("#max-tokens").fill("20")
    start(page, "[think] [differs]")
    page.locator(".output .token").first.wait_for(state="attached")
    assert violations() == []
    finish(page)
    assert violations() == []
    page.locator("#step").fill("3")
    assert violations() == []
    run(page, "[trees]")
    page.locator("#step").fill("3")
    assert violations() == []
    # It would find something.
    page.evaluate("document.querySelector('label[for=prompt]').remove()")
    assert any(found.startswith("label") for found in violations(runOnly=["label"]))


def test_a_phone_scrolls_in_one_direction(site: Site, visit):
    page = visit(site, chat=True, viewport={"width": 320, "height": 640}, has_touch=True)

    def overhang() -> list[str]:
        assert page.evaluate("document.documentElement.scrollWidth") <= 320
        return page.evaluate(
            """() => [...document.querySelectorAll('body *:not(.visually-hidden *)')]
                .filter(node => node.getBoundingClientRect().right > 320.5)
                .map(node => node.outerHTML.slice(0, 80))"""
        )

    assert overhang() == []
    page.locator("#max-tokens").fill("20")
    page.locator("#runs").fill("2")
    run(page, "[differs]" + "x" * 300)
    assert overhang() == []
    page.locator("#step").fill("3")
    assert overhang() == []


def test_the_keyboard_is_enough(site: Site, visit):
    page = visit(site)
    page.keyboard.press("Tab")
    expect(page.locator("#prompt")).to_be_focused()
    page.keyboard.press("Control+a")
    page.keyboard.type("def add(a, b):")
    seen = []
    while len(seen) < 40:
        page.keyboard.press("Tab")
        focus = "[document.activeElement.id || document.activeElement.className, "
        # The choice's field is invisible, the outline is drawn around the word beside it.
        focus += """(document.activeElement.name === 'order' ? document.activeElement
            .nextElementSibling : document.activeElement).matches('body') ? '' : getComputedStyle(
            document.activeElement.name === 'order' ? document.activeElement.nextElementSibling
            : document.activeElement).outlineStyle]"""
        name, outline = page.evaluate(focus)
        if not outline:
            break
        seen.append(name)
        assert outline == "solid", f"{name} does not show its focus"
    assert {"depth", "temperature", "max-tokens", "seed", "run", "on", "output"} <= set(seen)
    page.locator("#prompt").focus()
    page.keyboard.press("Control+Enter")
    page.locator(".output .token").first.wait_for(state="attached")
    page.keyboard.press("Escape")
    finish(page)
    page.locator("#run").focus()
    page.keyboard.press("Enter")
    expect(page.locator("#stop")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("#run")).to_be_focused()


@both_sites
def test_the_policy_is_in_force(site: Site, visit):
    page = visit(site)
    page.evaluate(
        """() => {
            const script = document.createElement('script');
            script.textContent = 'window.isBroken = true';
            document.body.append(script);
        }"""
    )
    assert page.evaluate("window.isBroken") is None
    until(lambda: any("Content Security Policy" in text for text in page.problems), page)
    page.problems.clear()


def test_the_page_stays_where_the_reader_has_scrolled(site: Site, visit):
    page = visit(site)
    page.locator("#max-tokens").fill("30")
    page.locator("#run").focus()
    page.keyboard.press("Enter")
    expect(page.locator("#stop")).to_be_focused()
    page.evaluate("scrollTo(0, document.body.scrollHeight)")
    finish(page)
    assert page.evaluate("document.activeElement.id") == "run"
    assert page.evaluate("document.querySelector('#run').getBoundingClientRect().bottom") < 0


def test_on_a_phone_the_answers_come_into_view(site: Site, visit):
    page = visit(site, viewport={"width": 375, "height": 667}, reduced_motion="reduce")
    page.locator("#max-tokens").fill("20")
    assert page.evaluate("scrollY") == 0
    top = "document.querySelector('[data-proposer=%s]').getBoundingClientRect().top"
    start(page, "def add(a, b):")
    wait_until(page, f"0 <= {top % 'plain'} && {top % 'plain'} < 100")
    assert page.locator("#stop").evaluate("box => box.getBoundingClientRect().bottom") <= 667
    finish(page)
    assert 0 <= page.evaluate(top % "peagle") < 250
    # Who scrolls away is left alone.
    page.locator("#run").click()
    wait_until(page, f"{top % 'plain'} < 100")
    page.mouse.wheel(0, -5000)
    wait_until(page, "scrollY === 0")
    finish(page)
    assert page.evaluate("scrollY") == 0


@both_sites
def test_slow_motion_shows_each_refused_draft(site: Site, visit):
    page = visit(site, reduced_motion="reduce")
    page.locator("#max-tokens").fill("24")
    chosen = only(page, "peagle")
    assert not page.locator("#replay").is_visible()
    run(page, "def fibonacci(n):")
    whole = answer(chosen)
    accepted, drafted = map(int, re.findall(r"(\d+) of (\d+) draft", counts(chosen))[0])
    tally = []
    for number in range(1, int(page.locator("#step").get_attribute("max")) + 1):
        page.locator("#step").fill(str(number))
        state = chosen.locator(".state").inner_text()
        refused = chosen.locator(".output .refused").count()
        told = re.findall(r": (\d+) of (\d+) accepted", state) or [(0, 0)]
        tally.append((*map(int, told[0]), refused))
        assert page.locator("#step-label").inner_text().startswith(f"step {number} of ")
    assert [sum(numbers) for numbers in zip(*tally)] == [accepted, drafted, drafted - accepted]
    # The text of the last step without its refused drafts is the answer.
    page.evaluate("document.querySelectorAll('.output .refused').forEach(node => node.remove())")
    assert chosen.locator(".output").text_content() == whole


# ---- the real server ----


def test_the_examples_have_good_answers(real_site: Site, visit):
    page = visit(real_site)
    answered, prompts = {}, []
    first = page.locator("#prompt").input_value()
    for chip in page.locator("#examples button").all():
        chip.click()
        prompts.append(prompt := page.locator("#prompt").input_value())
        body = {"model": "peagle-code", "prompt": prompt, "temperature": 0, "max_tokens": 128}
        response = HTTP.post(f"{real_site.url}/v1/completions", json=body).json()
        answered[chip.inner_text()] = prompt + response["choices"][0]["text"]
    assert first == prompts[0]
    made = {name: run_python(text) for name, text in answered.items() if name != "Class"}
    with pytest.warns(DeprecationWarning, match="use new"):
        assert made["Decorator"]["deprecated"]("use new")(lambda a, b: a - b)(5, b=2) == 3
    calls: list[int] = []
    remembered = made["Cache"]["memoize"](lambda n: calls.append(n) or n)
    assert [remembered(4), remembered(4), remembered(5)] == [4, 4, 5] and calls == [4, 5]
    assert [*made["Generator"]["chunks"]([1, 2, 3, 4, 5], 2)] == [[1, 2], [3, 4], [5]]
    # The class is cut at its last method.
    proxy = run_python(answered["Class"].rpartition("    def ")[0])["Proxy"]
    assert [*proxy("ab")] == ["a", "b"] and proxy("ab") == proxy("ab") and "b" in proxy("ab")
    assert repr(proxy("ab")) == "Proxy('ab')"


def run_python(text: str) -> dict[str, Any]:
    """The names that a text defines."""
    names: dict[str, Any] = {}
    exec(text, names)
    return names


def test_the_first_run_is_identical(real_site: Site, visit):
    page = visit(real_site)
    page.locator("#run").click()
    finish(page)
    answers = {answer(column(page, name)) for name in PROPOSERS}
    assert len(answers) == 1 and answers.pop().endswith("return decorator\n")
    for name in ("eagle3", "peagle"):
        assert column(page, name).locator(".badge").inner_text() == "Identical to plain"
        assert column(page, name).locator(".state").inner_text() == "finished"
    assert page.locator("#summary").inner_text().count("Identical to plain.") == 2


def test_a_chat_model_chats_by_default(visit):
    options = ("--target", PAIR2 / "target", "--draft", PAIR2 / "peagle")
    with live.running(*options, warm=True) as server:
        page = visit(Site(server.url), chat=None)
        sent = []
        page.on("request", lambda r: r.method == "POST" and sent.append((r.url, r.post_data_json)))
        expect(page.locator("#chat")).to_be_checked()
        page.locator("#max-tokens").fill("120")
        run(page, "What is a package?")
        first = column(page, "plain").locator(".output .answer").text_content()
        assert first and column(page, "plain").locator(".output .reasoning").text_content()
        run(page, "And then?")
    assert [url.removeprefix(server.url) for url, _ in sent] == ["/v1/chat/completions"] * 4
    turns = [
        {"role": "user", "content": "What is a package?"},
        {"role": "assistant", "content": first},
        {"role": "user", "content": "And then?"},
    ]
    assert [body["messages"] for _, body in sent] == [turns[:1]] * 2 + [turns] * 2
    assert column(page, "peagle").locator(".badge").inner_text() == "Identical to plain"


# ---- the script of the fake server ----


@pytest.mark.parametrize("name", PROPOSERS)
def test_accepted_tokens_are_marked(fake: Site, visit, name):
    page = visit(fake)
    chosen = only(page, name)
    run(page, "def fibonacci(n):")
    steps = script(name, TOKENS, 0 if name == "plain" else 4)
    marks = [[t, i < step.num_accepted] for step in steps for i, t in enumerate(step.tokens)]
    assert chosen.evaluate(MARKS) == marks
    assert any(drafted for _, drafted in marks) == (name != "plain")
    assert answer(chosen) == "def fibonacci(n):" + "".join(TOKENS)
    lines = "node => getComputedStyle(node).textDecorationLine"
    for token in chosen.locator(".output .token").all()[:12]:
        is_drafted = "draft" in token.get_attribute("class")
        assert token.evaluate(lines) == ("underline" if is_drafted else "none")


def test_refused_drafts_appear_and_go(fake: Site, visit):
    page = visit(fake)
    page.evaluate(WATCH_OUTPUT)
    chosen = only(page, "peagle")
    start(page, "def fibonacci(n):")
    refused = chosen.locator(".ghosts .refused")
    refused.first.wait_for(state="attached")
    assert re.fullmatch(r"no\d", refused.first.text_content() or "no9")
    finish(page)
    wait_until(page, "!document.querySelector('.ghosts .refused')", 3)
    assert page.evaluate("seen.ghosts") >= 2


def test_reduced_motion_shows_no_refused_drafts(fake: Site, visit):
    page = visit(fake, reduced_motion="reduce")
    page.evaluate(WATCH_OUTPUT)
    only(page, "peagle")
    run(page, "def fibonacci(n):")
    assert page.evaluate("seen") == {"ghosts": 0, "batches": page.evaluate("seen.batches")}
    assert page.evaluate("seen.batches") > 3


def test_slow_motion_of_a_known_stream(fake: Site, visit):
    page = visit(fake)
    chosen = only(page, "peagle")
    run(page, "def fibonacci(n):")
    page.locator("#step").fill("2")
    # The first step is the prompt's; each later one goes on with what was accepted, refused, own.
    steps = script("peagle", TOKENS, 4)
    nodes = """column => [...column.querySelectorAll('.output .current, .output .refused')]
        .map(node => [node.textContent, node.className])"""
    for number, step in enumerate(steps[1:6], start=2):
        *drafts, own = step.tokens
        shown = [[text, "token draft current"] for text in drafts]
        shown += [[text, "refused"] for text in step.rejected] + [[own, "token current"]]
        assert chosen.evaluate(nodes) == shown
        told = f"{step.num_accepted} of 4 accepted"
        state = f"step {number}: {told}"
        assert chosen.locator(".state").inner_text() == state
        page.keyboard.press("ArrowRight")
    before = int(page.locator("#step").input_value())
    page.locator("#play").click()
    wait_until(page, f"document.querySelector('#step').value > {before + 1}")
    page.keyboard.press("Escape")
    place = page.locator("#step").input_value()
    assert page.locator("#play").inner_text() == "Slow motion"
    page.wait_for_timeout(800)
    assert page.locator("#step").input_value() == place
    page.locator("#run").click()
    expect(page.locator("#replay")).to_be_hidden()
    finish(page)
    assert answer(chosen) == "def fibonacci(n):" + "".join(TOKENS)


def test_the_tree_of_a_step_is_drawn(fake: Site, visit):
    page = visit(fake)
    run(page, "[trees]")
    chosen = column(page, "peagle")
    steps = script("peagle", TOKENS, 4)
    caption, drawing = chosen.locator(".tree figcaption"), chosen.locator(".tree svg")
    count = steps[-1].num_accepted
    expect(caption).to_have_text(f"Tree of step {len(steps)}: {count} of 4 nodes accepted")
    # Chains have no drawing.
    expect(column(page, "eagle3").locator(".tree")).to_be_hidden()

    titles = "nodes => nodes.map(node => node.querySelector('title').textContent)"
    cells = "rows => rows.map(row => [...row.cells].map(cell => cell.textContent))"
    for number, (before, step) in enumerate(pairwise(steps[:5]), start=2):
        page.locator("#step").fill(str(number))
        expect(caption).to_have_text(
            f"Tree of step {number}: {step.num_accepted} of 4 nodes accepted"
        )
        root, path = before.tokens[-1], step.tokens[: step.num_accepted]
        assert drawing.locator(".root").evaluate_all(titles) == [root]
        assert drawing.locator(".node.lit").evaluate_all(titles) == path
        assert drawing.locator(".edge.lit").count() == len(path)
        others = "g.node:not(.lit):not(.root)"
        assert drawing.locator(others).evaluate_all(titles) == step.rejected
        texts, depths = [root], [0]
        rows = []
        for text, parent, is_accepted in step.tree:
            texts.append(text)
            depths.append(depths[parent] + 1)
            verdict = "yes" if is_accepted else "no"
            rows.append([str(depths[-1]), text, texts[parent], verdict])
        assert chosen.locator(".tree tbody tr").evaluate_all(cells) == rows
        # The text itself goes on with what was accepted alone.
        assert chosen.locator(".output .refused").count() == 0
    page.locator("#step").fill("1")
    expect(caption).to_have_text("Step 1 has no tree")
    assert drawing.locator("g").count() == 0
    run(page, "again, with chains")
    expect(chosen.locator(".tree")).to_be_hidden()


def test_a_tree_has_its_accepted_path_on_the_first_line(fake: Site, visit):
    page = visit(fake)
    lay = """async tree => (await import('/static/playground.js')).layTree(tree, 'root')
        .map(({text, depth, line}) => [text, depth, line])"""
    tree = [["a", 0, False], ["b", 0, True], ["c", 1, False], ["d", 2, False], ["e", 2, True]]
    assert page.evaluate(lay, [*tree, ["f", 0, False]]) == [
        ["root", 0, 0],
        ["a", 1, 2],
        ["b", 1, 0],
        ["c", 2, 2],
        ["d", 2, 1],
        ["e", 2, 0],
        ["f", 1, 3],
    ]


@pytest.mark.parametrize(
    ("prompt", "temperature", "badges"),
    [
        ("x", "0", ["Identical to plain", "Identical to plain"]),
        (
            "[differs]",
            "0",
            [
                f"Differs from plain at token 7: “other”, plain has “{TOKENS[6]}”",
                "Identical to plain",
            ],
        ),
        (
            "[differs]",
            "0.5",
            [
                f"Sampled. Differs from plain at token 7: “other”, plain has “{TOKENS[6]}”",
                "Sampled. Identical to plain",
            ],
        ),
    ],
)
def test_answers_are_compared_with_plain(fake: Site, visit, prompt, temperature, badges):
    page = visit(fake)
    page.locator("#temperature").fill(temperature)
    run(page, prompt)
    shown = [column(page, name).locator(".badge") for name in ("eagle3", "peagle")]
    assert [badge.inner_text() for badge in shown] == badges
    column(page, "plain").locator(".on").uncheck()
    page.locator("#run").click()
    finish(page)
    assert [badge.inner_text() for badge in shown] == ["Not compared: plain has no answer"] * 2


def test_where_answers_differ(fake: Site, visit):
    page = visit(fake)
    differ = "async args => (await import('/static/playground.js')).differenceFrom(...args)"
    cases = [
        (["a", "b"], "ab", ["a", "b"], "ab", None),
        (["a", "\n"], "a\n", ["a", " "], "a ", "token 2: “ ”, plain has “⏎”"),
        (["a"], "a", ["a", "b"], "ab", "token 2: “b”, plain has the end"),
        (["a", "b"], "ab", ["a"], "a", "token 2: the end, plain has “b”"),
        (["\ufffd", "\ufffd"], "é", ["\ufffd", "\ufffd"], "è", "character 1"),
    ]
    for plain_tokens, plain_text, tokens, text, words in cases:
        plain, ours = {"tokens": plain_tokens, "text": plain_text}, {"tokens": tokens, "text": text}
        assert page.evaluate(differ, [plain, ours]) == words


def test_repeated_runs_show_their_noise(fake: Site, visit):
    page = visit(fake)
    page.locator("#runs").fill("3")
    run(page, "[differs]")
    assert fake.state is not None
    asked = [request["speculation"]["proposer"] for request in fake.state.requests]
    assert asked == PROPOSERS * 3
    token = "token 7: “other”, plain has"
    badge = column(page, "eagle3").locator(".badge").inner_text()
    assert badge.startswith(f"Differs from plain in 3 of 3 runs, at {token}")
    assert (
        column(page, "peagle").locator(".badge").inner_text() == "Identical to plain in 3 of 3 runs"
    )
    # The marks follow from the ranges that the table shows.
    texts = page.locator("#results td:nth-child(2) small").all_inner_texts()
    ranges = [[*map(float, text.split("–"))] for text in texts]
    medians = [float(stat(column(page, name), "rate")) for name in PROPOSERS]
    assert all(low <= middle <= high for (low, high), middle in zip(ranges, medians))
    labels = ["Plain", "EAGLE-3", "P-EAGLE"]
    overlapping = [
        f"{labels[i]} and {labels[j]}"
        for i, j in ((0, 1), (0, 2), (1, 2))
        if ranges[i][0] <= ranges[j][1] and ranges[j][0] <= ranges[i][1]
    ]
    noise = page.locator("#spread").inner_text()
    assert re.findall(r"\S+ and \S+(?=[;.])", noise.partition("noise between ")[2]) == overlapping
    for name, label in zip(PROPOSERS[1:], labels[1:]):
        is_noise = f"Plain and {label}" in overlapping
        assert stat(column(page, name), "speedup").endswith("× noise" if is_noise else "×")


def test_what_counts_as_noise(fake: Site, visit):
    page = visit(fake)
    module = "async args => (await import('/static/playground.js'))"
    overlap = f"{module}.overlap(...args)"
    pairs = [([1, 2], [3, 4]), ([3, 4], [1, 2]), ([1, 3], [2, 4]), ([1, 9], [2, 3]), (None, [1, 2])]
    assert [page.evaluate(overlap, [*pair]) for pair in pairs] == [False, False, True, True, False]
    assert page.evaluate(f"{module}.median(args)", [5, 1, 30]) == 5
    assert page.evaluate(f"{module}.median(args)", [5, 1, 30, 6]) == 5.5


def test_a_conversation_goes_on(fake: Site, visit):
    page = visit(fake, chat=True)
    column(page, "eagle3").locator(".on").uncheck()
    run(page, "[think] one")
    chosen = column(page, "peagle")
    assert answer(chosen) == "".join(TOKENS)
    # Reasoning stands apart, also where one step has both; drafts are marked in either.
    assert chosen.locator(".reasoning").text_content() == "".join(TOKENS[:NUM_REASONING])
    said = "".join(TOKENS[NUM_REASONING:])
    assert chosen.locator(".output .answer").text_content() == said
    steps = script("peagle", TOKENS, 4)
    marks = [[t, i < step.num_accepted] for step in steps for i, t in enumerate(step.tokens)]
    assert chosen.evaluate(MARKS) == marks
    dim, bright = chosen.evaluate(
        "box => ['.reasoning', '.answer'].map(n => getComputedStyle(box.querySelector(n)).color)"
    )
    assert dim != bright
    assert page.locator("#prompt").input_value() == ""
    run(page, "two")
    assert fake.state is not None
    turns = [
        {"role": "user", "content": "[think] one"},
        {"role": "assistant", "content": said},
        {"role": "user", "content": "two"},
    ]
    messages = [request["messages"] for request in fake.state.requests]
    assert messages == [turns[:1]] * 2 + [turns] * 2
    assert page.locator("#turns li span").all_text_contents()[:3] == [t["content"] for t in turns]
    # A stopped answer is no turn, and its message can be sent again.
    start(page, "[slow]")
    page.locator(".output .token").first.wait_for(state="attached")
    page.keyboard.press("Escape")
    finish(page)
    assert page.locator("#prompt").input_value() == "[slow]"
    assert page.locator("#turns li").count() == 4
    page.locator("#new-conversation").click()
    expect(page.locator("#conversation")).to_be_hidden()
    run(page, "three")
    assert fake.state.requests[-1]["messages"] == [{"role": "user", "content": "three"}]


def test_numbers_of_a_known_stream(fake: Site, visit):
    page = visit(fake)
    run(page, "def fibonacci(n):")
    # 42 tokens after the first. P-EAGLE accepts 3, 0, 4, 2 of 4: 13 drafts, 29 accepted tokens.
    shown = {name: column(page, name) for name in PROPOSERS}
    assert [stat(shown[name], "acceptance") for name in PROPOSERS] == ["–", "2.47", "3.23"]
    cells = "rows => rows.map(row => row.textContent)"
    positions = shown["peagle"].locator("tbody tr").evaluate_all(cells)
    assert positions == ["177%", "277%", "346%", "423%"]
    labels = shown["peagle"].locator(".positions text.strong").evaluate_all(cells)
    assert labels == ["77%", "77%", "46%", "23%"]
    assert "29 of 52 draft tokens accepted" in shown["peagle"].locator(".counts").inner_text()
    assert not shown["plain"].locator(".positions").is_visible()

    rates = {name: float(stat(shown[name], "rate")) for name in PROPOSERS}
    speedups = {name: float(stat(shown[name], "speedup")[:-1]) for name in PROPOSERS}
    assert speedups["plain"] == 1 < speedups["eagle3"] < speedups["peagle"]
    assert speedups["peagle"] == pytest.approx(rates["peagle"] / rates["plain"], rel=0.02)
    widths = "bars => bars.map(bar => bar.width.baseVal.value)"
    bars = page.locator("#speedup-chart .bar").evaluate_all(widths)
    assert bars[2] / bars[0] == pytest.approx(speedups["peagle"], rel=0.02)
    points = "lines => lines.map(line => line.points.numberOfItems)"
    assert min(page.locator("#speed-chart polyline").evaluate_all(points)) > 10
    rows = page.locator("#results tbody tr").evaluate_all(cells)
    assert [row.startswith(name) for row, name in zip(rows, ("Plain", "EAGLE-3", "P-EAGLE"))]
    assert rows[2].endswith(f"{speedups['peagle']:.2f}×3.23")


@pytest.mark.parametrize("words", ["[copies]", "[copies] [short]"], ids=["whole", "cut"])
def test_what_the_text_drafted(fake: Site, visit, words: str):
    # The last accepted draft is the text's. A cut answer has no totals: 3, 0, 4, 2 of 4 drafts.
    page = visit(fake)
    run(page, words)
    steps = script("peagle", TOKENS, 4)
    drafts = [step for step in steps[: 5 if "short" in words else None] if step.num_drafted]
    shares = [sum(step.num_accepted == i for step in drafts) / len(drafts) for i in range(1, 5)]
    chosen = column(page, "peagle")
    last = "rows => rows.map(row => row.lastElementChild.textContent)"
    rows = chosen.locator(".positions tbody tr")
    assert rows.evaluate_all(last) == [f"{100 * share:.0f}%" for share in shares]
    count = sum(step.num_accepted > 0 for step in drafts)
    shown = chosen.locator(".counts").inner_text()
    assert shown.endswith(f"accepted, {count} of them drafted by the text alone")
    heights = "bars => bars.map(bar => bar.height.baseVal.value)"
    hollow = chosen.locator(".positions .hollow").evaluate_all(heights)
    track = max(chosen.locator(".positions .track").evaluate_all(heights))
    assert [height / track for height in hollow] == pytest.approx([s for s in shares if s])
    expect(chosen.locator("figcaption .of-text")).to_be_visible()
    other = column(page, "eagle3")
    assert other.locator(".of-text:visible, .hollow").count() == 0
    assert "text" not in other.locator(".counts").inner_text()


def test_numbers_while_it_runs(fake: Site, visit):
    # The stream ends after 4 drafts, without the totals: 3 + 0 + 4 + 2 accepted of 4 each.
    page = visit(fake)
    chosen = only(page, "peagle")
    run(page, "[short]")
    assert stat(chosen, "acceptance") == "3.25"
    labels = chosen.locator(".positions text.strong").all_text_contents()
    assert labels == ["75%", "75%", "50%", "25%"]
    assert "was lost" in chosen.locator(".problem").inner_text()


def test_the_totals_of_the_server_rule(fake: Site, visit):
    # They count a step that gave no text, such as one in the middle of a character.
    page = visit(fake)
    measured = page.evaluate(
        """async () => {
            const meter = new (await import('/static/playground.js')).Meter(2);
            meter.step(1, 1, null);
            meter.step(3, 3, {num_drafted: 2, num_accepted: 2});
            const before = [meter.rate, meter.acceptanceLength, ...meter.acceptance];
            meter.finish({completion_tokens: 5, speculation: {num_drafts: 2, num_draft_tokens: 4,
                num_accepted_tokens: 2, num_accepted_tokens_per_pos: [1, 1]}});
            return [before, [meter.tokens, meter.acceptanceLength, ...meter.acceptance]];
        }"""
    )
    assert measured == [[1.5, 3, 1, 1], [5, 2, 0.5, 0.5]]


def test_what_is_sent(fake: Site, visit):
    page = visit(fake)
    page.locator("#depth").fill("2")
    page.locator("#temperature").fill("0.7")
    page.locator("#max-tokens").fill("50")
    page.locator("#seed").fill("11")
    run(page, "x = ")
    assert fake.state is not None
    sent = fake.state.requests
    assert [request.pop("speculation") for request in sent] == [
        {"proposer": "plain", "num_speculative_tokens": 0, "report": "trees"},
        {"proposer": "eagle3", "num_speculative_tokens": 2, "report": "trees"},
        {"proposer": "peagle", "num_speculative_tokens": 2, "report": "trees"},
    ]
    common = {"model": "tiny-code", "stream": True, "stream_options": {"include_usage": True}}
    common |= {"temperature": 0.7, "max_tokens": 50, "seed": 11}
    assert sent == [common | {"prompt": "x = "}] * 3
    assert fake.state.most_at_once == 1
    page.locator("#chat").check()
    page.locator("#seed").fill("")
    page.locator("[value=together]").check()
    chosen = column(page, "peagle")
    chosen.locator(".on").uncheck()
    run(page, "hello")
    assert fake.state.paths[3:] == ["/v1/chat/completions"] * 2
    del common["seed"]
    del sent[3]["speculation"]
    assert sent[3] == common | {"messages": [{"role": "user", "content": "hello"}]}
    assert fake.state.most_at_once == 2
    assert answer(column(page, "eagle3")) == "".join(TOKENS)


def test_values_out_of_range_are_not_sent(fake: Site, visit):
    page = visit(fake)
    page.locator("#depth").fill("5")
    start(page, "x")
    page.wait_for_timeout(200)
    assert fake.state is not None and fake.state.requests == []
    assert page.locator("#depth").evaluate("field => field.validity.rangeOverflow")


def test_hostile_text_is_text(fake: Site, visit):
    page = visit(fake)
    run(page, "[hostile]<img src=x onerror=alert(3)>")
    assert answer(column(page, "peagle")) == "[hostile]<img src=x onerror=alert(3)>" + "".join(
        HOSTILE
    )
    assert page.locator("main img, main script").count() == 0


@pytest.mark.parametrize(
    ("prompt", "message", "noise"),
    [
        ("[full]", "The queue is full: 64 requests wait. Try again in 7 s.", "429"),
        ("[broken]", "The engine ran out of memory.", None),
        ("[short]", "The connection to the server was lost before the answer", None),
        ("[cut]", "The connection to the server was lost before the answer", "INCOMPLETE_CHUNKED"),
    ],
)
def test_errors_in_plain_words(fake: Site, visit, prompt, message, noise):
    page = visit(fake)
    chosen = only(page, "peagle")
    run(page, prompt)
    expect(chosen.locator(".problem")).to_contain_text(message)
    assert page.locator("#summary").inner_text() == "P-EAGLE failed."
    # The browser itself logs what goes wrong on the network.
    assert all(noise and noise in text for text in page.problems)
    page.problems.clear()
    run(page, "again")
    expect(chosen.locator(".problem")).to_be_hidden()
    assert "failed" not in page.locator("#summary").inner_text()


def test_a_server_that_is_gone(visit):
    with running(make_app(State())) as url:
        page = visit(Site(url))
    run(page, "x")
    for problem in page.locator(".problem").all():
        expect(problem).to_have_text("The server cannot be reached.")
    assert len(page.problems) == 3 and all("ERR_CONNECTION" in text for text in page.problems)
    page.problems.clear()


def test_a_server_that_still_loads(fake: Site, visit):
    page = visit(fake)
    body = '{"error": {"message": "The models are still loading."}}'
    refuse = {"status": 503, "headers": {"Retry-After": "2"}, "body": body}
    page.route("**/v1/models", lambda route: route.fulfill(**refuse))
    page.reload()
    expect(page.locator("#banner")).to_contain_text("The models are still loading.")
    expect(page.locator("#run")).to_be_disabled()
    page.locator("#max-tokens").fill("33")
    page.unroute("**/v1/models")
    expect(page.locator("#run")).to_be_enabled()
    expect(page.locator("#max-tokens")).to_have_value("33")
    expect(page.locator("#depth")).to_have_value("4")
    expect(page.locator("#banner")).to_be_hidden()
    assert all("503" in text for text in page.problems)
    page.problems.clear()


def test_models_differ_in_what_they_can(fake: Site, visit):
    page = visit(fake)
    methods = [
        {"name": "plain", "num_speculative_tokens": 0},
        {"name": "<b>", "num_speculative_tokens": 20},
    ]
    models = [
        {"id": "old", "chat": False, "speculation": {"default": "plain", "proposers": methods[:1]}},
        {"id": "new", "chat": True, "speculation": {"default": "<b>", "proposers": methods}},
    ]
    page.route("**/v1/models", lambda route: route.fulfill(json={"data": models}))
    page.reload()
    expect(page.locator(".column")).to_have_count(1)
    for name in ("#depth", "#chat"):
        expect(page.locator(name)).to_be_hidden()
    page.locator("#model").select_option("new")
    expect(page.locator(".column .name")).to_have_text(["Plain", "<b>"])
    expect(page.locator("#depth")).to_have_value("20")
    expect(page.locator("#chat")).to_be_visible()
    expect(page.locator("#chat")).to_be_checked()
    page.locator("#model").select_option("old")
    expect(page.locator("#chat")).not_to_be_checked()
    run(page, "x")
    assert fake.state is not None
    assert [request["model"] for request in fake.state.requests] == ["old"]


def test_stop_ends_the_request(fake: Site, visit):
    page = visit(fake)
    start(page, "[slow]")
    tokens = page.locator(".output .token")
    tokens.first.wait_for(state="attached")
    page.locator("#stop").click()
    finish(page)
    assert fake.state is not None
    state = fake.state
    until(lambda: state.disconnects == 1, page)
    assert len(state.requests) == 1
    assert column(page, "plain").locator(".state").inner_text() == "stopped"
    count = tokens.count()
    page.wait_for_timeout(500)
    assert tokens.count() == count


def test_characters_cut_between_chunks(fake: Site, visit):
    page = visit(fake)
    run(page, "[wide]")
    for name in PROPOSERS:
        assert answer(column(page, name)) == "[wide]" + "".join(WIDE)
    # Every cut into two parts, for each end of line; comments and empty events are passed over.
    results = page.evaluate(
        """async () => {
            const { readEvents } = await import('/static/playground.js');
            const results = new Set();
            for (const end of ['\\n', '\\r\\n', '\\r']) {
                const lines = ': hello||data: 🦅é|data:x||id: 1||data: y||: z'.split('|');
                const bytes = new TextEncoder().encode(lines.join(end));
                for (let cut = 0; cut <= bytes.length; cut++) {
                    const stream = new ReadableStream({start(controller) {
                        controller.enqueue(bytes.slice(0, cut));
                        controller.enqueue(bytes.slice(cut));
                        controller.close();
                    }});
                    const events = [];
                    for await (const data of readEvents(stream)) events.push(data);
                    results.add(JSON.stringify(events));
                }
            }
            return [...results];
        }"""
    )
    assert results == ['["🦅é\\nx","y"]']


def test_text_rules_over_tokens(fake: Site, visit):
    # A stop string holds text back, a special token has none that is shown.
    page = visit(fake)
    align = "async args => (await import('/static/playground.js')).alignTokens(...args)"
    cases = [
        ("ab", [["a", True], ["b", False]], [["a", True], ["b", False]]),
        ("held a", [[" a", True], ["<end>", False]], [["held", False], [" a", True]]),
        ("a tail", [["", True], ["a", True]], [["a", True], [" tail", False]]),
        ("", [["STOP", True]], []),
    ]
    for text, tokens, parts in cases:
        assert page.evaluate(align, [text, tokens]) == parts


def test_drawing_keeps_up(fake: Site, visit):
    page = visit(fake)
    page.evaluate(WATCH_OUTPUT)
    chosen = only(page, "peagle")
    run(page, "[fast]")
    # All 2000 are there when it says so; steps share frames, so that there are fewer batches.
    assert chosen.locator(".token").count() == 2000
    steps = len(script("peagle", ["w"] * 2000, 4))
    seconds = float(re.findall(r"in ([\d.]+) s", chosen.locator(".counts").inner_text())[0])
    assert page.evaluate("seen.batches") <= min(steps, 61 * seconds + 2)
    box = "box => box.scrollHeight - box.scrollTop - box.clientHeight"
    assert chosen.locator(".output").evaluate(box) < 40


def test_the_fake_server_sends_the_policy(fake: Site, visit):
    page = visit(fake)
    assert page.reload().headers["content-security-policy"] == CSP
