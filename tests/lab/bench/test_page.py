"""The HTML page, in a real browser: Debian's Chromium, driven by Playwright."""

from __future__ import annotations

import copy
import csv
import shutil
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import pytest
from example import SKIPPED, example_results

from fulmen.lab.bench import suites
from fulmen.lab.bench.owners import Owner
from fulmen.lab.bench.report.page import page
from fulmen.lab.bench.report.side_by_side import history, side_by_side
from fulmen.lab.bench.results import Cell, Results

playwright = pytest.importorskip("playwright.sync_api")

LASD = '[data-suite="lasd"]'
QUICK, LARGEST = (256, 1024, 4096), 300_000  # lengths of the quick preset, and the most bytes that its page may have
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = ["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--disable-background-networking"]
PATIENCE = 120_000.0  # milliseconds, for one answer: a busy machine may not run Chromium for a while


@pytest.fixture(scope="module")
def browser() -> Iterator[playwright.Browser]:
    executable = next((path for name in NAMES if (path := shutil.which(name))), None)
    if executable is None:
        pytest.skip("THE HTML PAGE IS NOT TESTED: there is no Chromium here (Debian: apt-get install chromium)")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=executable, args=FLAGS, timeout=PATIENCE)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(page(example_results()), encoding="utf-8")
    return path


class Opened:
    """A page, and what it complained of and asked for."""

    def __init__(self, browser: playwright.Browser, address: str, width: int = 1280, dark: bool = False) -> None:
        scheme = "dark" if dark else "light"
        self.page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        self.page.set_default_timeout(PATIENCE)
        self.problems: list[str] = []
        self.requests: list[str] = []
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("console", lambda said: said.type in ("error", "warning") and self.problems.append(said.text))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(address)
        # Once shown, the page draws its charts again in their true size.
        self.page.evaluate("new Promise(shown => requestAnimationFrame(() => requestAnimationFrame(shown)))")

    def close(self) -> None:
        self.page.close()
        assert self.problems == []
        # The page itself and its empty icon.
        loaded = [url for url in self.requests if not url.startswith(("data:", "blob:"))]
        assert len(loaded) == 1, loaded


@pytest.fixture
def opened(browser: playwright.Browser, path: Path) -> Iterator[playwright.Page]:
    opened = Opened(browser, path.as_uri())
    yield opened.page
    opened.close()


def written(results: Results, folder: Path) -> str:
    """The address of their page."""
    path = folder / "report.html"
    path.write_text(page(results), encoding="utf-8")
    return path.as_uri()


def curves(opened: playwright.Page, kind: str = ":not(.published)") -> list[str]:
    """The names of those that have at least two points."""
    return opened.evaluate(
        f"[...document.querySelectorAll('{LASD} .series{kind}')]"
        ".filter(g => g.querySelector('.line').getTotalLength() > 20 && g.querySelectorAll('circle').length > 1)"
        ".map(g => g.dataset.name)"
    )


def names(opened: playwright.Page) -> list[str]:
    return opened.locator(f"{LASD} tbody tr").evaluate_all("rows => rows.map(row => row.dataset.column)")


def figures(opened: playwright.Page, key: str) -> list[float]:
    """Of one column of the table, from top to bottom; not a number where there is none."""
    keys = opened.locator(f"{LASD} thead button").evaluate_all("all => all.map(button => button.dataset.key)")
    texts = opened.locator(f"{LASD} tbody tr > :nth-child({keys.index(key) + 1})").all_text_contents()
    return [float("nan") if text.startswith("–") else float(text.lstrip("~").replace(",", "")) for text in texts]


def test_curves_are_drawn_with_their_spread(opened: playwright.Page) -> None:
    expected = next(table for table in example_results().tables if table.suite == "lasd")
    assert curves(opened) == expected.columns
    shown = opened.locator("[data-suite]").evaluate_all("all => all.map(s => s.dataset.suite)")
    assert shown == list(suites.reports())
    assert all(opened.locator(f'[data-suite="{name}"] .series .line').count() for name in shown)
    assert opened.locator(f"{LASD} .series .band").count() == len(expected.columns)


def test_every_column_says_whose_it_is(opened: playwright.Page) -> None:
    row = opened.locator(f'{LASD} tbody tr[data-column="LASD_P"] th')
    assert row.inner_text().startswith("Fulmen, head decay")
    assert row.locator(".badge.ours").inner_text() == "ours"
    assert opened.locator(f'{LASD} tbody tr[data-column="LP"] .badge').inner_text() == "our rendering of lightning_attn"
    assert opened.locator(f'{LASD} tbody tr[data-column="Flash"] .badge').inner_text().startswith("torch")
    card = opened.locator('.card[href="#flao"]').inner_text()
    assert "Fulmen, fused against" in card
    assert "(our rendering, in torch)" in card
    assert "the median of 3 sections and sizes" not in card  # one section has a fused column
    legend = opened.locator(f'{LASD} .legend [data-column="LASD_P"]').inner_text()
    assert legend.startswith("Fulmen, head decay")
    assert "LASD_P" in legend


def test_sections_have_their_own_descriptions(browser: playwright.Browser, tmp_path: Path) -> None:
    results, tables = example_results(QUICK), []
    for section in ("token gate", "decode, token gate"):
        table = copy.deepcopy(results.tables[0])
        table.suite, table.section, table.columns, table.baseline = "delta", section, ["Fulmen"], "transformers"
        table.title, table.mode, table.metric = "delta-speed-fwd-batch1-head8-dim128-fp32", "fwd", "speed"
        table.cells, table.owners = [Cell(256, "Fulmen", 1.0)], {"Fulmen": Owner("fulmen")}
        tables.append(table)
    results.tables = tables
    opened = Opened(browser, written(results, tmp_path))
    row = opened.page.locator('[data-suite="delta"] tbody tr th')
    assert "delta_rule, token decay" in row.inner_text()
    opened.page.select_option('[data-suite="delta"] select', "1")
    assert "delta_rule_step, token decay" in row.inner_text()
    opened.close()


def test_a_legend_toggle_hides_and_shows_a_curve(opened: playwright.Page) -> None:
    before = curves(opened)
    opened.click(f'{LASD} .legend [data-column="Flash"]')
    assert curves(opened) == [name for name in before if name != "Flash"]
    opened.click(f'{LASD} .legend [data-column="Flash"]')
    assert curves(opened) == before


def test_published_curves_are_switched_on_and_say_what_they_are(opened: playwright.Page) -> None:
    assert curves(opened, ".published") == []
    assert opened.locator(f"{LASD} label.switch").inner_text() == "Published: A100, batch4-head32-dim128-bf16"
    opened.click(f"{LASD} label.switch input")
    published = curves(opened, ".published")
    assert "LASD_P (A100, batch4-head32-dim128-bf16)" in published
    assert len(published) == 10
    dashes = opened.evaluate(f"getComputedStyle(document.querySelector('{LASD} .published .line')).strokeDasharray")
    assert dashes != "none"


def test_a_table_is_sorted(opened: playwright.Page) -> None:
    published_order = names(opened)
    opened.click(f'{LASD} thead [data-key="4096"]')
    times = figures(opened, "4096")
    assert times[-1] != times[-1], "LASD_R has no time at 4096 and goes last"
    assert times[:-1] == sorted(times[:-1])
    assert names(opened) != published_order
    opened.click(f'{LASD} thead [data-key="4096"]')
    assert figures(opened, "4096")[:-1] == sorted(times[:-1], reverse=True)
    opened.click(f'{LASD} thead [data-key="4096"]')
    assert names(opened) == published_order


def test_views_show_their_figures(opened: playwright.Page) -> None:
    """Against the results themselves; and a pass that a view does not have comes back with the next that has it."""
    lasd = [table for table in example_results().tables if table.suite == "lasd" and table.config["batch"] == 4]
    tables = {(table.metric, table.mode): table for table in lasd}

    def shown(column: str) -> float:
        return figures(opened, "2048")[names(opened).index(column)]

    def measured(metric: str, mode: str, column: str) -> float:
        cell = tables[metric, mode].cell(2048, column)
        assert cell is not None
        assert cell.value is not None
        return cell.value

    def pressed(value: str) -> str | None:
        return opened.get_attribute(f'{LASD} [data-value="{value}"]', "aria-pressed")

    assert shown("LASD_P") == pytest.approx(measured("speed", "fwd", "LASD_P"), rel=0.01)
    opened.click(f'{LASD} [data-value="tokens"]')
    assert shown("LASD_P") == pytest.approx(4 * 2048e3 / measured("speed", "fwd", "LASD_P"), rel=0.01)
    opened.click(f'{LASD} [data-value="rate"]')
    products = 4 * 4 * 2048 * 32 * 128**2
    assert shown("LASD_P") == pytest.approx(products / measured("speed", "fwd", "LASD_P") / 1e6, rel=0.01)
    opened.click(f'{LASD} [data-value="speedup"]')
    expected = measured("speed", "fwd", "Flash") / measured("speed", "fwd", "LASD_P")
    assert shown("LASD_P") == pytest.approx(expected, rel=0.01)
    opened.click(f'{LASD} [data-value="total"]')
    flash, ours = (sum(measured("speed", mode, name) for mode in ("fwd", "bwd")) for name in ("Flash", "LASD_P"))
    assert shown("LASD_P") == pytest.approx(flash / ours, rel=0.01)
    opened.click(f'{LASD} [data-value="memory"]')
    assert shown("LASD_P") == pytest.approx(measured("memory", "fwd", "LASD_P"), rel=0.01)
    opened.click(f'{LASD} [data-value="speedup"]')
    assert pressed("total") == "true"
    opened.click(f'{LASD} [data-value="memory"]')
    opened.click(f'{LASD} [data-value="bwd"]')
    assert shown("LASD_P") == pytest.approx(measured("memory", "bwd", "LASD_P"), rel=0.01)
    assert len(curves(opened)) == 10


def test_an_address_restores_a_view(browser: playwright.Browser, opened: playwright.Page) -> None:
    opened.click(f'{LASD} [data-value="speedup"]')
    opened.click(f'{LASD} [data-value="bwd"]')
    opened.click(f'{LASD} .legend [data-column="Flash"]')
    opened.click(f"{LASD} label.switch input")
    again = Opened(browser, opened.url)
    for read in (curves, names):
        assert read(again.page) == read(opened)
    assert figures(again.page, "2048") == figures(opened, "2048")
    assert curves(again.page, ".published") == curves(opened, ".published") != []
    again.close()


def test_any_address_opens_the_page_and_a_new_one_changes_the_view(browser: playwright.Browser, path: Path) -> None:
    opened = Opened(browser, f"{path.as_uri()}#100%")
    assert len(curves(opened.page)) == 10
    opened.page.evaluate("location.hash = 'lasd?view=speedup&mode=bwd&hide=Flash'")
    opened.page.wait_for_selector(f'{LASD} [data-value="speedup"][aria-pressed="true"]')
    assert "Flash" not in curves(opened.page)
    opened.close()


def test_runs_side_by_side(browser: playwright.Browser, tmp_path: Path) -> None:
    """A colour for each column, a dash for each run; and labels with commas in links."""
    runs = {name: example_results(QUICK) for name in ("a, b.json", "c.json")}
    opened = Opened(browser, written(side_by_side(runs), tmp_path))
    shown = opened.page
    lines = shown.evaluate(
        f"Object.fromEntries([...document.querySelectorAll('{LASD} .series')].map(g => [g.dataset.name,"
        " [g.style.color, g.querySelector('.line').getAttribute('stroke-dasharray')]]))"
    )
    first, second, other = (lines[name] for name in ("LASD_P [a, b.json]", "LASD_P [c.json]", "LAND_P [a, b.json]"))
    assert first[0] == second[0] != other[0]
    assert first[1] == other[1] != second[1]
    shown.click(f'{LASD} .legend [data-column="LASD_P [a, b.json]"]')
    again = Opened(browser, shown.url)
    assert "LASD_P [a, b.json]" not in curves(again.page)
    assert "LASD_P [c.json]" in curves(again.page)
    again.close()
    opened.close()


def test_a_history_is_labelled_by_date_and_version(browser: playwright.Browser, tmp_path: Path) -> None:
    runs = [example_results(QUICK) for _ in range(3)]
    for i, run in enumerate(runs):
        run.started = f"2026-0{i + 1}-15T12:00:00+00:00"
    opened = Opened(browser, written(history(runs), tmp_path))
    texts = opened.page.locator(f"{LASD} .chart svg text").all_text_contents()
    assert {"2026-01-15", "2026-02-15", "2026-03-15", "0.1.0"} <= set(texts)
    circles = opened.page.locator(f'{LASD} .series[data-name="LASD_P"] circle')
    x = [float(circle.get_attribute("cx") or "nan") for circle in circles.all()]
    assert x[1] - x[0] == pytest.approx(x[2] - x[1], abs=0.2)  # runs are counted, not measured
    opened.close()


def test_a_view_is_saved(opened: playwright.Page) -> None:
    opened.click(f'{LASD} [data-value="speedup"]')
    with opened.expect_download() as saved:
        opened.click(f'{LASD} [data-save="CSV"]')
    rows = list(csv.DictReader(StringIO(Path(saved.value.path()).read_text())))
    assert [row["column"] for row in rows] == names(opened)
    assert rows[1]["unit"] == "×"
    saved_figures = [float(row["2048"] or "nan") for row in rows]
    assert saved_figures == pytest.approx(figures(opened, "2048"), rel=0.01, nan_ok=True)
    with opened.expect_download() as saved:
        opened.click(f'{LASD} [data-save="SVG"]')
    picture = Path(saved.value.path()).read_text()
    assert picture.startswith("<svg")
    assert "LASD_P" in picture
    assert "var(--" not in picture.replace("color: var(--", "")  # colours are in it, not in the page's style sheet


def test_noise_is_marked(browser: playwright.Browser, tmp_path: Path) -> None:
    results = example_results(QUICK)
    table = next(table for table in results.tables if table.suite == "lasd")
    cell = table.cell(1024, "LASD_P")
    assert cell is not None
    assert cell.value is not None
    cell.p80 = 2 * cell.value
    cell.sittings = [cell.value, cell.p80]
    results.conditions.before, results.conditions.crowded = 3.5, 3.5
    opened = Opened(browser, written(results, tmp_path))
    texts = opened.page.locator(f'{LASD} tbody tr[data-column="LASD_P"] td').all_text_contents()
    assert [text.startswith("~") for text in texts[:3]] == [False, True, False]
    assert texts[3] == "103%"  # the spread
    assert "Error: against float64, at n = 131, batch 2" in opened.page.inner_text(f"{LASD} .notes")
    opened.page.click(f'{LASD} [data-value="total"]')
    texts = opened.page.locator(f'{LASD} tbody tr[data-column="LASD_P"] td').all_text_contents()
    assert texts[1].startswith("~")
    assert texts[3].endswith("%")
    assert opened.page.locator(f"{LASD} .series .band").count() == 10
    cell = table.cell(1024, "Flash")
    assert cell is not None
    assert cell.value is not None
    cell.sittings = [cell.value, 2 * cell.value]
    opened.close()
    opened = Opened(browser, written(results, tmp_path))
    opened.page.click(f'{LASD} [data-value="speedup"]')
    texts = opened.page.locator(f'{LASD} tbody tr[data-column="LC"] td').all_text_contents()
    assert [text.startswith("~") for text in texts[:3]] == [False, True, False]  # over a noisy baseline
    assert "not to be trusted; repeat on a quiet machine" in opened.page.inner_text(f"{LASD} .notes")
    assert "cores busy with other work, 3.5 before it began" in opened.page.inner_text("#warning")
    opened.close()


def test_the_pointer_tells_figures(opened: playwright.Page) -> None:
    opened.hover(f"{LASD} .chart svg")
    tip = opened.locator(f"{LASD} .tip")
    assert "LASD_P" in tip.inner_text()
    assert "ms" in tip.inner_text()
    assert tip.is_visible()
    assert "Fulmen, head decay" in tip.inner_text()
    opened.click(f"{LASD} label.switch input")
    for width in (1280, 400):
        opened.set_viewport_size({"width": width, "height": 900})
        opened.hover(f"{LASD} .chart svg")
        assert "published, A100, batch4-head32-dim128-bf16" in tip.inner_text()
        assert tip.locator(".more", has_text="published").first.is_visible()


def test_environment_and_reasons_are_shown(opened: playwright.Page) -> None:
    text = opened.inner_text("#environment") + opened.inner_text("#skipped")
    for expected in ("Example CPU", "2.13.0+cpu", "torch finds no CUDA or HIP device", *SKIPPED.values()):
        assert expected in text
    assert not opened.locator("#warning").is_visible()


@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("dark", [False, True])
def test_nothing_is_wider_than_the_window(browser: playwright.Browser, path: Path, width: int, dark: bool) -> None:
    opened = Opened(browser, path.as_uri(), width, dark)
    shown = opened.page
    assert shown.evaluate("document.documentElement.scrollWidth") <= width
    assert shown.evaluate("document.documentElement.dataset.theme") == ("dark" if dark else "light")
    chart = shown.locator(f"{LASD} .chart svg").bounding_box()
    assert chart is not None
    assert 0.7 * width < chart["width"] + 120
    assert chart["width"] < width
    assert shown.locator(f"{LASD} .chart svg text", has_text="8192").count() == 1  # the last length
    shown.hover(f"{LASD} .chart svg")
    tip = shown.locator(f"{LASD} .tip").bounding_box()
    assert tip is not None
    if width == 400:
        assert tip["y"] >= shown.locator(f"{LASD} .chart svg").bounding_box()["y"] + chart["height"] - 1
    opened.close()


def test_the_theme_is_switched(opened: playwright.Page) -> None:
    before = opened.evaluate("getComputedStyle(document.body).backgroundColor")
    opened.click("#theme")
    assert opened.evaluate("getComputedStyle(document.body).backgroundColor") != before


def test_results_with_nothing_in_them_make_a_page(browser: playwright.Browser, tmp_path: Path) -> None:
    """A run that was stopped at once, and one where every cell was skipped."""
    full = example_results()
    for table in full.tables:
        for cell in table.cells:
            cell.value, cell.skipped = None, 'a reason with </script> and "quotes"'
    Opened(browser, written(Results(full.environment, full.options, full.started), tmp_path)).close()
    opened = Opened(browser, written(full, tmp_path))
    assert 'a reason with </script> and "quotes"' in opened.page.inner_text("#skipped")
    opened.close()


def test_results_without_times_show_memory(browser: playwright.Browser, tmp_path: Path) -> None:
    """As a dry run for a GPU gives them."""
    results = example_results()
    results.tables = [table for table in results.tables if table.suite == "lasd" and table.metric == "memory"]
    opened = Opened(browser, written(results, tmp_path))
    assert opened.page.get_attribute(f'{LASD} [data-value="memory"]', "aria-pressed") == "true"
    assert opened.page.locator(f'{LASD} [data-value="speed"]').is_disabled()
    assert len(curves(opened.page)) == 10
    opened.close()


def test_size() -> None:
    assert len(page(example_results(QUICK)).encode()) < LARGEST
