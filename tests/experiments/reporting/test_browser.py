"""The report in a real browser: it answers to the pointer, asks for nothing, and fits every width."""

from __future__ import annotations

import json
import shutil

import pytest

from conftest import ROOT
from stored_runs import full_run
from tcil.experiments.reporting.collect import read_runs
from tcil.experiments.reporting.page import write_report

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.processes,
    pytest.mark.xdist_group("browser"),
    pytest.mark.skipif(CHROMIUM is None, reason="needs chromium (apt-get install chromium)"),
]
SYNC = "playwright.sync_api"


@pytest.fixture(scope="module")
def run():
    return full_run()


@pytest.fixture(scope="module")
def address(run, tmp_path_factory):
    return write_report([run], tmp_path_factory.mktemp("page") / "report.html").as_uri()


@pytest.fixture(scope="module")
def several(tmp_path_factory):
    """The page of two studies that docs/results keeps, each with two seeds."""
    runs = read_runs([ROOT / "docs/results/letters"])
    some = [run for run in runs if run.settings.learner in ("er", "wa") and run.seed in (2, 3)]
    assert len(some) == 4
    return write_report(some, tmp_path_factory.mktemp("several") / "report.html").as_uri()


@pytest.fixture(scope="module")
def browser():
    sync = pytest.importorskip(SYNC, reason="needs playwright (the extra dev)")
    with sync.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield chromium
        chromium.close()


@pytest.fixture
def visit(browser, address):
    """Opens the page; whatever it asks for or complains of fails the test."""
    pages, opened_pages, asked, said = [], set(), [], []

    def opened(width=1440, height=900, at=address, **options):
        page = browser.new_page(viewport={"width": width, "height": height}, **options)
        pages.append(page)
        page.on("request", lambda request: asked.append(request.url))
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.goto(at)
        opened_pages.add(at)
        return page

    yield opened
    for page in pages:
        page.close()
    assert [url for url in asked if url not in opened_pages and not url.startswith("blob:")] == []
    assert said == []


def figure(page, title):
    """The first figure below a heading, drawn."""
    found = page.locator("section", has=page.get_by_role("heading", name=title)).locator("figure.chart").first
    found.scroll_into_view_if_needed()
    page.wait_for_function("figure => figure.dataset.live === 'true'", arg=found.element_handle(), timeout=60_000)
    return found


def over(page, at, place=0.5):
    """What is said when the pointer is over an element, at this share of its width."""
    area = at.bounding_box()
    page.mouse.move(area["x"] + place * area["width"], area["y"] + area["height"] / 2)
    page.wait_for_selector(".tip:not([hidden])")
    rows = page.locator(".tip tr").all()
    return {row.locator("td").first.inner_text(): row.locator("td").last.inner_text() for row in rows}


def test_the_pointer_and_the_switches(visit, run):
    page = visit()
    chart = figure(page, "Task by task")
    last, vanilla = len(run.tasks) - 1, "vanilla"
    column = chart.locator(".live .mark-rect path").nth(last)
    said = over(page, column)
    assert page.locator(".tip p").inner_text() == f"After task {last}"
    assert said["Vanilla"].startswith(f"{100 * run.row(-1, vanilla).ece:.2f} %")
    assert set(said) == {"Vanilla", "TS", "T-CIL", "PACT", "Optimal TS", "noise floor"}

    chart.get_by_role("checkbox", name="Vanilla", exact=True).uncheck()
    chart.get_by_role("radio", name="predicted new").check()
    page.mouse.move(1, 1)
    said = over(page, chart.locator(".live .mark-rect path").nth(last))
    assert "Vanilla" not in said
    assert said["TS"].startswith(f"{100 * run.row(-1, 'ts').ece_predicted_new:.2f} %")
    lines = chart.locator(".live .mark-line path")
    assert lines.count() == 4
    with page.expect_download() as download:
        chart.get_by_role("button", name="Save as SVG").click()
    saved = download.value.path().read_text()
    assert saved.startswith("<svg")
    assert ">T-CIL<" in saved
    assert ">Vanilla<" not in saved
    chart.get_by_role("button", name="none").click()
    page.wait_for_function("n => n.querySelectorAll('.live .mark-line path').length === 0", arg=chart.element_handle())


def test_the_slider_of_the_reliability_diagrams(visit, run):
    page = visit()
    chart = figure(page, "Reliability diagrams")
    first = chart.locator(".panel").first
    told = first.locator(".told")
    assert told.inner_text() == f"ECE {100 * run.row(-1, 'vanilla').ece:.1f} %"
    chart.get_by_role("slider").fill("1")
    assert told.inner_text() == f"ECE {100 * run.row(1, 'vanilla').ece:.1f} %"
    chart.get_by_role("radio", name="predicted old").check()
    assert told.inner_text() == f"ECE {100 * run.row(1, 'vanilla').ece_predicted_old:.1f} %"
    bins = run.row(1, "vanilla").bins
    highest = max(place for place, count in enumerate(bins.count) if count)
    page.wait_for_timeout(100)
    bars = first.locator(".live .mark-rect").last.locator("path")
    said = over(page, bars.last)
    assert said["accuracy"] == f"{bins.accuracy[highest]:.3f}"
    assert said["confidence"] == f"{bins.confidence[highest]:.3f}"
    hidden = chart.locator(".panel", has_text="IRM")
    assert not hidden.is_visible()
    chart.get_by_role("checkbox", name="IRM").check()
    hidden.locator(".live svg").wait_for()


@pytest.mark.parametrize("width", [360, 768, 1440])
def test_nothing_overflows(visit, width):
    page = visit(width=width, color_scheme="dark" if width == 768 else "light")
    for title in ("Task by task", "Reliability diagrams", "Classes, and T-CIL's search"):
        figure(page, title)
    check_widths(page)


@pytest.mark.slow
@pytest.mark.parametrize("width", [360, 1440])
def test_nothing_overflows_on_a_page_of_several_studies(visit, several, width):
    page = visit(width=width, at=several)
    figure(page, "ER on letters")
    check_widths(page)
    assert page.locator("nav ul ul").first.is_visible() == (width == 1440)  # on a phone they would fill a screen
    table = page.locator("header .wide").first
    table.evaluate("wide => { wide.scrollLeft = 1000; }")
    # What a row is, and of what, is seen wherever one scrolls.
    for part in ("caption span", "tr.heading span", "th[scope=row]", ".note"):
        assert table.locator(part).first.bounding_box()["x"] == pytest.approx(table.bounding_box()["x"], abs=4), part
    page.emulate_media(media="print")
    page.set_viewport_size({"width": 720, "height": 900})  # A4 with margins
    assert page.evaluate("document.documentElement.scrollWidth") <= 720


def check_widths(page):
    page.evaluate("document.querySelectorAll('details').forEach((part) => { part.open = true; })")
    assert page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth") <= 0
    beyond = """() => [...document.querySelectorAll('body *')]
        .filter((part) => !part.closest('.wide, .live, svg, .tip'))
        .filter((part) => part.getBoundingClientRect().right > document.documentElement.clientWidth + 1)
        .map((part) => part.outerHTML)"""
    assert page.evaluate(beyond) == []


def test_tables_sort_by_column(visit):
    page = visit()
    table = page.locator("header table").first
    button = table.get_by_role("button", name="ECE", exact=True)
    for direction in ("ascending", "descending"):
        button.click()
        assert table.locator(f"th[aria-sort={direction}]").inner_text().startswith("ECE")
        cells = table.locator("tbody").first.locator("tr td:nth-child(2)[data-value]").all()
        values = [float(cell.get_attribute("data-value")) for cell in cells]
        assert values == sorted(values, reverse=direction == "descending")
        assert len(values) > 3
    headings = [heading.inner_text().strip() for heading in table.locator("tr.heading").all()]
    assert headings[0] == "Calibrators"  # blocks stay where they are
    assert "Limits" in headings


@pytest.mark.slow
@pytest.mark.parametrize("which", ["address", "several"])
def test_axe_finds_no_error(visit, which, request):
    axe = pytest.importorskip("axe_core_python.sync_playwright", reason="needs axe-core-python (the extra dev)")
    contrast = {"runOnly": {"type": "rule", "values": ["color-contrast"]}}
    for scheme, rules in (("light", {}), ("dark", contrast)):
        page = visit(color_scheme=scheme, bypass_csp=True, at=request.getfixturevalue(which))
        for title in ("Task by task", "Reliability diagrams"):
            figure(page, title)
        page.get_by_text("Settings", exact=True).first.click()
        page.get_by_text("The values drawn").first.click()
        # The insides of pictures are many elements; `test_page` checks that each picture has words.
        pictures = {"exclude": [[".view"], [".static"]]}
        found = axe.Axe().run(page, context=pictures, options={"resultTypes": ["violations"], **rules})
        assert [(rule["id"], rule["nodes"][0]["html"]) for rule in found["violations"]] == []
        assert len(found["passes"]) >= (20 if scheme == "light" else 1)


def test_without_scripts_and_in_print(visit):
    page = visit(java_script_enabled=False)
    pictures = page.locator(".static svg").all()
    assert len(pictures) >= 8
    assert all(picture.is_visible() for picture in pictures)
    assert not page.locator(".controls").first.is_visible()
    scripted = visit()
    figure(scripted, "Task by task")
    scripted.emulate_media(media="print")
    assert all(picture.is_visible() for picture in scripted.locator(".static svg").all())
    assert not scripted.locator(".live svg").first.is_visible()
    content = json.loads(scripted.locator("script.data").first.text_content())
    assert content["spec"]["layer"]
