"""report.html in a real browser: charts, toggles, small screens and the dark theme."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

from sluice.benchmark.results import as_document, write_report
from support.comparisons import runs_of, scenario

api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

_CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

pytestmark = pytest.mark.skipif(_CHROMIUM is None, reason="no Chromium is installed: apt-get install chromium")

#: Start a separate browser, offline and without updates.
_ARGUMENTS = [
    "--disable-gpu",
    "--disable-quic",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]

#: Counts the pixels of the canvas that have the color of a method's button, with a tolerance for smoothing.
_PIXELS = """(method) => {
  const swatch = document.querySelector(`button[data-method="${method}"] .swatch`);
  const [r, g, b] = (swatch.dataset.colour ||= getComputedStyle(swatch).backgroundColor).match(/\\d+/g).map(Number);
  const canvas = document.querySelector("#chart canvas");
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  let count = 0;
  for (let i = 0; i < data.length; i += 4)
    count += Math.abs(data[i] - r) + Math.abs(data[i + 1] - g) + Math.abs(data[i + 2] - b) < 12 && data[i + 3] > 200;
  return count;
}"""

Open = Callable[..., Any]


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page of two tables; in the second, one method is killed under a limit."""
    title = "GPT-2 small </script><b>not markup</b>"
    scenarios = [scenario("float32", title=title), scenario("bfloat16", title=title, limit=800 << 20)]
    path = tmp_path_factory.mktemp("report") / "report.html"
    runs = [run for each in scenarios for run in runs_of(each)]
    machine = {"date": "2026-11-21", "processor": "a processor with a <name>"}
    command = "sluice bench --size small --ram-limit 800MiB"
    write_report(path, as_document(machine=machine, command=command, scenarios=scenarios, runs=runs), scenarios, runs)
    return path


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    arguments = [*_ARGUMENTS, *(["--no-sandbox"] if os.getuid() == 0 else [])]  # its sandbox does not run as root
    with api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=_CHROMIUM, args=arguments)
        yield started
        started.close()


@pytest.fixture
def open_page(browser: Any, page_file: Path) -> Iterator[Open]:
    """Open the page; fail the test if the page requests another file or its script logs an error."""
    requested: list[str] = []
    complaints: list[str] = []
    contexts: list[Any] = []

    def opened(*, width: int = 1100, scheme: Literal["light", "dark"] = "light", **options: Any) -> Any:
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, **options)
        contexts.append(context)
        page = context.new_page()
        page.on("request", lambda request: requested.append(request.url))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
        page.goto(page_file.as_uri())
        return page

    yield opened
    for context in contexts:
        context.close()
    assert set(requested) == {page_file.as_uri()}
    assert complaints == []


@pytest.fixture
def page(open_page: Open) -> Any:
    return open_page()


def _settle(page: Any) -> None:
    """Wait until changes are drawn: uPlot draws in a microtask, the browser in the next frame."""
    page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


def _pixels(page: Any, method: str) -> int:
    _settle(page)
    return int(page.evaluate(_PIXELS, method))


def test_every_method_is_drawn_and_can_be_toggled(page: Any) -> None:
    before = {method: _pixels(page, method) for method in ("naive", "mmap", "sluice")}
    assert min(before.values()) > 200
    button = page.get_by_role("button", name="naive")
    assert button.get_attribute("aria-pressed") == "true"
    button.click()
    page.mouse.move(0, 0)  # hovering over a button would draw the other methods pale
    assert button.get_attribute("aria-pressed") == "false"
    assert _pixels(page, "naive") < 20
    assert _pixels(page, "sluice") > 0.9 * before["sluice"]
    button.click()
    page.mouse.move(0, 0)
    assert _pixels(page, "naive") > 0.9 * before["naive"]


def test_methods_are_toggled_and_the_chart_is_read_with_the_keyboard(page: Any) -> None:
    button = page.get_by_role("button", name="mmap")
    button.focus()
    page.keyboard.press("Space")
    assert button.get_attribute("aria-pressed") == "false"
    page.locator("#chart").focus()
    assert _pixels(page, "mmap") < 20
    page.keyboard.press("ArrowRight")
    _settle(page)
    tip = page.locator("#tip")
    assert tip.is_visible()
    assert "sluice" in tip.inner_text()
    assert "mmap" not in tip.inner_text()


def test_hovering_shows_what_each_method_holds(page: Any) -> None:
    box = page.locator("#chart .u-over").bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.25, box["y"] + 50)  # the axis ends at two seconds
    _settle(page)
    text = page.locator("#tip").inner_text()
    figures = dict(line.split(": ") for line in text.splitlines()[1:])
    assert {name: float(figure.removesuffix(" MiB")) for name, figure in figures.items()} == pytest.approx(
        {"naive": 250, "sluice": 260, "mmap": 167}, rel=0.05
    )
    page.mouse.move(box["x"] + box["width"] * 0.9, box["y"] + 50)
    _settle(page)
    assert "sluice: done" in page.locator("#tip").inner_text()


def test_choices_change_what_is_drawn(page: Any) -> None:
    linear = _pixels(page, "naive")
    page.get_by_label("log", exact=True).check(force=True)
    assert abs(_pixels(page, "naive") - linear) > 50
    page.get_by_label("linear", exact=True).check(force=True)
    page.get_by_label("mapped file", exact=True).check(force=True)
    _settle(page)
    assert "500 MiB" in page.get_by_role("button", name="mmap").inner_text()
    assert "0 MiB" in page.get_by_role("button", name="naive").inner_text()


def test_all_charts_have_the_same_time_axis(page: Any) -> None:
    box = page.locator("#chart .u-over").bounding_box()
    moments = set()
    for label in ("fp32, cold", "bf16, cold, 800 MiB"):  # the second ends after 1.5 s, the first after 2 s
        page.get_by_label(label, exact=True).check(force=True)
        page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 50)
        _settle(page)
        moments.add(page.locator("#tip b").inner_text())
        page.mouse.move(0, 0)
    assert len(moments) == 1


def test_only_what_is_drawn_has_a_mark(page: Any) -> None:
    caption = page.locator("#caption")
    assert "died" not in caption.inner_text()
    page.get_by_label("mapped file", exact=True).check(force=True)
    assert _pixels(page, "mmap") > 200
    dots = """() => {
      let count = 0;
      const draw = CanvasRenderingContext2D.prototype.arc;
      CanvasRenderingContext2D.prototype.arc = function (...all) { count += 1; return draw.apply(this, all); };
      return () => count;
    }"""
    page.evaluate(f"window.dots = ({dots})()")
    page.get_by_label("log", exact=True).check(force=True)
    _settle(page)
    assert page.evaluate("window.dots()") == 1  # that of the only method with mapped pages
    page.get_by_label("bf16, cold, 800 MiB", exact=True).check(force=True)
    assert "died" in caption.inner_text()


def test_a_casualty_is_marked_in_chart_button_and_table(page: Any) -> None:
    page.get_by_label("bf16, cold, 800 MiB", exact=True).check(force=True)
    _settle(page)
    assert "killed at 700 MiB" in page.get_by_role("button", name="naive").inner_text()
    assert _pixels(page, "naive") > 200
    alarms = page.locator("td.alarm")
    assert alarms.all_inner_texts() == ["killed", "killed"]
    assert "naive: out of memory: killed by the kernel at the limit of 800 MiB" in page.locator("main").inner_text()


def test_names_are_text_and_the_command_is_there(page: Any) -> None:
    title = page.locator("h1").inner_text()
    assert title == "GPT-2 small </script><b>not markup</b>, float32"
    finding = "fp32, cold: sluice 1.00 s with 1.04 F; the fastest and leanest other method was mmap"
    assert page.title().startswith(f"{title}, {finding}")
    assert finding in page.locator("#caption").inner_text()  # the chart is not without a word
    assert "a processor with a <name>" in page.locator("main").inner_text()
    assert page.locator("pre").inner_text().strip() == "sluice bench --size small --ram-limit 800MiB"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_needs_no_horizontal_scrolling(open_page: Open, scheme: str) -> None:
    page = open_page(width=390, scheme=scheme, device_scale_factor=2, is_mobile=True)
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    assert page.evaluate("Math.max(...[...document.querySelectorAll('body *')].map((e) => e.scrollWidth))") <= 390
    assert _pixels(page, "sluice") > 200
    assert page.locator("tbody tr").first.evaluate("(row) => getComputedStyle(row).display") == "grid"


def test_the_dark_has_other_colours_and_follows_the_system(page: Any) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    swatch = "getComputedStyle(document.querySelector('button[data-method=sluice] .swatch')).backgroundColor"
    light = page.evaluate(ground), page.evaluate(swatch)
    page.emulate_media(color_scheme="dark")
    for _ in range(100):  # not wait_for_function, whose second look is an eval that the page forbids
        dark = page.evaluate(ground), page.evaluate(swatch)  # the page is notified after its style has changed
        if dark[0] != light[0] and dark[1] != light[1]:
            break
        page.wait_for_timeout(50)
    assert dark[0] != light[0]
    assert dark[1] != light[1]
    assert _pixels(page, "sluice") > 200  # drawn again, in the new color
