"""The playground in a real browser: it reads, draws, continues, and asks nobody but its own server."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from logdepth.data import DataConfig, Tokenizer, TokenizerConfig, prepare
from logdepth.decoding import SamplingConfig
from logdepth.generate import generate
from logdepth.models import LM
from tests.browser import brightness, opened_browser
from tests.decoders import built
from tests.serving import NAME, Running, serving, wait_until
from tests.tiny_corpus import sentences

TEXT = "the cat sees a small dog\nin the garden . my neighbour draws"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with opened_browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def tokenizer(corpus: Path) -> Tokenizer:
    lossless = TokenizerConfig(vocab_size=320, lossless=True)
    return prepare(DataConfig(corpus="text", paths=(corpus,), tokenizer=lossless)).tokenizer


@pytest.fixture(scope="module")
def model(tokenizer: Tokenizer) -> LM:
    return built("memory-window", tokenizer.vocab_size)


@pytest.fixture(scope="module")
def running(model: LM, tokenizer: Tokenizer) -> Iterator[Running]:
    with serving(model, tokenizer, stretch=256, separated=False) as running:
        yield running


class Page:
    """The playground in a page of its own, and what it said and asked."""

    def __init__(self, browser: Any, url: str, width: int = 1280, scheme: str = "light") -> None:
        self.page = browser.new_page(viewport={"width": width, "height": 844}, color_scheme=scheme)
        self.page.set_default_timeout(120_000)  # where other tests keep all cores busy
        self.said: list[str] = []
        self.asked: set[str] = set()
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.asked.add(request.url))
        self.page.goto(url)
        self.wait("document.readyState === 'complete' && Boolean(model)")

    def value(self, script: str) -> Any:
        return self.page.evaluate(script)

    def wait(self, script: str) -> None:
        def holds() -> Any:
            self.page.wait_for_timeout(20)  # what the page does meanwhile
            return self.value(script)

        wait_until(holds)

    def text(self, selector: str) -> str:
        text: str = self.page.inner_text(selector)
        return text

    def type(self, text: str) -> None:
        self.page.fill("#text", text)
        self.wait(
            "!readAbort && !drawing && $('busy').textContent === '' && $('text').value === reading.texts.join('')"
        )


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_it_reads_and_draws(browser: Any, running: Running, tokenizer: Tokenizer, width: int, scheme: str) -> None:
    one = Page(browser, running.url, width, scheme)
    assert one.text("#model") == NAME
    one.type(TEXT)
    tokens = tokenizer.encode(TEXT)
    assert one.value("reading.tokens") == tokens
    assert one.value("[...document.querySelectorAll('#tokens .token')].length") == len(tokens)
    assert one.text("#tokens").replace("↵", "") == TEXT
    bits = one.value(
        "[...document.querySelectorAll('#tokens .token')].map(one => getComputedStyle(one).backgroundColor)"
    )
    assert len(set(bits)) > 5
    length = len(tokens)
    assert one.text("#tree-note").startswith(f"Token {length} reads its own chunk ({(length - 1) % 2 + 1} of 2 tokens)")
    blocks = one.value("[...document.querySelectorAll('#blocks tr')].slice(1).map(row => row.cells[1].textContent)")
    read = (length - 1) // 2
    assert [int(size) for size in blocks] == [2 << level for level in range(10) if read >> level & 1]
    weights = one.value("[...document.querySelectorAll('#blocks tr')].slice(1).map(row => row.cells[2].textContent)")
    expected = running.post("/v1/read", prompt=TEXT, weights=True)["chunks"][-1]["weights"][0][-1]
    assert [float(weight) for weight in weights] == pytest.approx(expected, abs=0.006)
    drawn = (
        "(() => { const one = $('tree'), data = one.getContext('2d').getImageData(0, 0, one.width, one.height).data;"
    )
    drawn += " let count = 0; for (let at = 3; at < data.length; at += 4) count += data[at] > 0; return count; })()"
    assert one.value(drawn) > 2000
    state = running.service.anatomy.state_bytes(length)
    assert one.value(f"stateBytes({length})") == state
    assert one.text("#state-bytes").split()[0] == f"{state / 1000:.1f}" if state < 1e4 else f"{state / 1000:.0f}"
    assert one.value("document.documentElement.scrollWidth") <= width, "the page scrolls sideways"
    ink, paper = (one.value(f"getComputedStyle(document.body).{name}") for name in ("color", "backgroundColor"))
    assert (brightness(ink) > brightness(paper)) == (scheme == "dark")
    one.page.click("#theme")
    assert brightness(one.value("getComputedStyle(document.body).color")) != brightness(ink)
    assert one.said == []
    assert {url.removeprefix(running.url).split("?")[0] for url in one.asked if not url.startswith("data:")} == {
        "/", "/v1/models", "/v1/read",
    }  # fmt: skip
    one.page.close()


def test_typing_reads_only_what_is_new(browser: Any, running: Running) -> None:
    one = Page(browser, running.url)
    text = sentences(60, seed=5)
    one.type(text)
    read = running.metric("prompt_tokens_total") - running.metric("cached_tokens_total")
    one.type(text + " and the cat")
    again = running.metric("prompt_tokens_total") - running.metric("cached_tokens_total") - read
    assert 0 < again < 300 < one.value("reading.tokens.length")
    expected = running.post("/v1/read", prompt=text + " and the cat")["chunks"]
    nats = [value for chunk in expected for value in chunk["nats"]]
    assert one.value("reading.nats")[1:] == pytest.approx(nats[1:])
    one.type("")
    assert one.value("reading.tokens.length") == 0
    assert "Nothing has been read yet" in one.text("#tokens")
    assert one.said == []
    one.page.close()


def test_it_continues_in_several_ways_from_any_token(
    browser: Any, running: Running, model: LM, tokenizer: Tokenizer
) -> None:
    one = Page(browser, running.url)
    one.type(TEXT)
    one.page.fill("#max-tokens", "9")
    one.page.fill("#seed", "4")
    one.page.focus("#tokens")
    for key in ("Home", "ArrowRight", "ArrowRight", "ArrowRight", "ArrowRight"):
        one.page.keyboard.press(key)
    one.wait("chosen === 4 && !drawing")
    assert one.text("#continue") == "Continue from token 5"
    assert "Token 5 of" in one.text("#about")
    assert one.value("document.querySelectorAll('#tokens .token.after').length") == len(tokenizer.encode(TEXT)) - 5
    one.page.keyboard.press("Enter")
    one.wait("ways.length === 3 && ways.every(way => way.ended) && !writeAbort")
    prompt = tokenizer.encode(TEXT)[:5]
    body = {"n": 3, "seed": 4, "max_tokens": 9, "temperature": 0.8, "top_p": 0.95}
    expected = [choice["text"] for choice in running.complete(prompt, **body)["choices"]]
    config = SamplingConfig(seed=4, max_tokens=9, temperature=0.8, top_p=0.95)
    first = "".join(
        piece.text for piece in generate(model, tokenizer, [tokenizer.decode(prompt)], config, separated=False)
    )
    assert one.value("ways.map(way => way.text)") == expected
    assert expected[0] == first
    assert one.value("ways.map(way => way.texts.join(''))") == expected
    assert "Token 14 reads" in one.text("#tree-note")  # which grows with the first way
    one.page.locator(".way button").nth(1).click()
    one.wait("!readAbort && !writeAbort && ways.length === 0 && reading.texts.join('') === $('text').value")
    assert one.value("$('text').value") == tokenizer.decode(prompt) + expected[1]
    one.page.locator("#tokens .token").nth(2).click()
    one.page.focus("#text")
    one.page.keyboard.press("Control+Enter")
    one.wait("ways.length === 3 && ways.every(way => way.ended === 'length')")
    assert one.said == []
    one.page.close()


def test_it_stops(browser: Any, running: Running) -> None:
    one = Page(browser, running.url, width=390)
    one.page.fill("#max-tokens", "100000")
    one.page.click("#continue")  # from nothing
    one.wait("!$('error').hidden")
    assert "cannot start from nothing" in one.text("#error")
    one.type(TEXT)
    one.page.click("#continue")
    one.wait("ways.length === 3 && ways[0].tokens.length > 3")
    one.page.keyboard.press("Escape")
    one.wait("ways.every(way => way.ended === 'stopped') && $('stop').disabled && $('error').hidden")
    wait_until(lambda: running.metric("growing_texts") == 0)
    assert [line for line in one.said if "400" not in line] == []  # the browser tells of the refusal
    one.page.close()


def test_a_long_text_is_read_with_a_plot(browser: Any, running: Running, tokenizer: Tokenizer, tmp_path: Path) -> None:
    text = sentences(450, seed=6)
    assert len(text) > 20_000
    file = tmp_path / "long.txt"
    file.write_text(text)
    one = Page(browser, running.url)
    one.page.set_input_files("#file", str(file))
    count = len(tokenizer.encode(text))
    one.wait(f"reading.tokens.length === {count} && !readAbort")
    assert one.text("#long-name").lower() == "long.txt"
    assert f"{count:,} of {count:,} tokens" in one.text("#long-speed")
    assert "in the first half" in one.text("#long-note")
    times = one.value("reading.times")
    assert [at for at, _, _ in times] == [*range(256, count, 256), count]
    assert all(time > 0 for _, time, _ in times)
    assert times[-1][2] == running.service.anatomy.state_bytes(count)
    one.page.focus("#tokens")
    one.page.keyboard.press("ArrowLeft")
    one.wait(f"chosen === {count - 2} && (reading.alternatives[chosen] || []).length === 6 && !drawing")
    assert len(one.value("reading.weights[0][chosen]")) == ((count - 2) // 2).bit_count()
    assert one.value("document.querySelectorAll('#tokens .token').length") <= 3000
    one.page.keyboard.press("Enter")
    one.wait("ways.length === 3 && ways.every(way => way.ended)")
    assert one.said == []
    one.page.close()


def test_it_asks_for_a_key(browser: Any, model: LM, tokenizer: Tokenizer) -> None:
    with serving(model, tokenizer, keys=["secret"], stretch=256) as running:
        page = browser.new_page()
        page.goto(running.url)
        page.wait_for_selector("#key-field")
        page.fill("#key-field", "secret")
        page.keyboard.press("Enter")
        page.wait_for_selector("#key", state="hidden")
        page.fill("#text", TEXT)
        page.wait_for_selector("#tokens .token")
        page.close()


def test_the_page_may_load_nothing_else(running: Running) -> None:
    response = running.client.get("/")
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "connect-src 'self'" in policy
    assert "http" not in response.text.replace("http-equiv", "")
