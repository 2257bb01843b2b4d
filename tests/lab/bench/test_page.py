"""The HTML page, in a real browser."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import Browser, find_chromium
from example import SKIPPED, example_results

from fulmen.lab.bench import suites
from fulmen.lab.bench.report.page import page
from fulmen.lab.bench.results import Results

LASD = '[data-suite="lasd"]'
LARGEST = 6 << 20


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    executable = find_chromium()
    if executable is None:
        pytest.skip("THE HTML PAGE IS NOT TESTED: there is no Chromium here (Debian: apt-get install chromium)")
    browser = Browser(executable, tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(page(example_results()), encoding="utf-8")
    return path


@pytest.fixture
def opened(browser: Browser, path: Path) -> Iterator[Browser]:
    browser.open(path, width=1280)
    yield browser
    assert browser.problems == []
    # The page itself and its empty icon.
    assert [url for url in browser.requests if not url.startswith("data:")] == [path.as_uri()]


def curves(browser: Browser, kind: str = ":not(.published)") -> list[str]:
    """The names of those that have at least two points."""
    return browser.run(
        f"[...document.querySelectorAll('{LASD} .series{kind}')]"
        ".filter(g => g.querySelector('path').getTotalLength() > 20 && g.querySelectorAll('circle').length > 1)"
        ".map(g => g.dataset.name)"
    )


def names(browser: Browser) -> list[str]:
    return browser.run(f"[...document.querySelectorAll('{LASD} tbody tr')].map(row => row.dataset.column)")


def figures(browser: Browser, key: str) -> list[float]:
    """Of one column of the table, from top to bottom; not a number where there is none."""
    keys = browser.run(f"[...document.querySelectorAll('{LASD} thead button')].map(button => button.dataset.key)")
    nth = f"{LASD} tbody tr > :nth-child({keys.index(key) + 1})"
    texts = browser.run(f"[...document.querySelectorAll('{nth}')].map(cell => cell.textContent)")
    return [float("nan") if text.startswith("–") else float(text.replace(",", "")) for text in texts]


def test_curves_are_drawn(opened: Browser) -> None:
    expected = next(table for table in example_results().tables if table.suite == "lasd")
    assert curves(opened) == expected.columns
    shown = opened.run("[...document.querySelectorAll('[data-suite]')].map(s => s.dataset.suite)")
    assert shown == list(suites.reports())
    assert opened.run("[...document.querySelectorAll('[data-suite]')].every(s => s.querySelector('.series path'))")


def test_a_legend_toggle_hides_and_shows_a_curve(opened: Browser) -> None:
    before = curves(opened)
    opened.click(f'{LASD} .legend [data-column="Flash"]')
    assert curves(opened) == [name for name in before if name != "Flash"]
    opened.click(f'{LASD} .legend [data-column="Flash"]')
    assert curves(opened) == before


def test_published_curves_are_switched_on(opened: Browser) -> None:
    assert curves(opened, ".published") == []
    opened.click(f"{LASD} label.switch input")
    published = curves(opened, ".published")
    assert "LASD_P (A100)" in published
    assert len(published) == 10
    dashes = opened.run(f"getComputedStyle(document.querySelector('{LASD} .published path')).strokeDasharray")
    assert dashes != "none"


def test_a_table_is_sorted(opened: Browser) -> None:
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


def test_views_show_their_figures(opened: Browser) -> None:
    """Against the results themselves: time, speedup over the baseline, memory, backward and both."""
    lasd = [table for table in example_results().tables if table.suite == "lasd" and table.config["batch"] == 4]
    tables = {(table.metric, table.mode): table for table in lasd}

    def shown(column: str) -> float:
        return figures(opened, "2048")[names(opened).index(column)]

    def measured(metric: str, mode: str, column: str) -> float:
        cell = tables[metric, mode].cell(2048, column)
        assert cell is not None
        assert cell.value is not None
        return cell.value

    assert shown("LASD_P") == pytest.approx(measured("speed", "fwd", "LASD_P"), rel=0.01)
    opened.click(f'{LASD} [data-value="speedup"]')
    expected = measured("speed", "fwd", "Flash") / measured("speed", "fwd", "LASD_P")
    assert shown("LASD_P") == pytest.approx(expected, rel=0.01)
    opened.click(f'{LASD} [data-value="total"]')
    flash, ours = (sum(measured("speed", mode, name) for mode in ("fwd", "bwd")) for name in ("Flash", "LASD_P"))
    assert shown("LASD_P") == pytest.approx(flash / ours, rel=0.01)
    opened.click(f'{LASD} [data-value="memory"]')
    assert shown("LASD_P") == pytest.approx(measured("memory", "fwd", "LASD_P"), rel=0.01)
    opened.click(f'{LASD} [data-value="bwd"]')
    assert shown("LASD_P") == pytest.approx(measured("memory", "bwd", "LASD_P"), rel=0.01)
    assert len(curves(opened)) == 10


def test_the_pointer_tells_figures(opened: Browser) -> None:
    opened.hover(f"{LASD} .chart svg")
    tip = opened.run(f"document.querySelector('{LASD} .tip').innerText")
    assert "LASD_P" in tip
    assert "ms" in tip
    assert opened.run(f"document.querySelector('{LASD} .tip').hidden") is False


def test_environment_and_reasons_are_shown(opened: Browser) -> None:
    text = opened.run("document.querySelector('#environment').innerText + document.querySelector('#skipped').innerText")
    for expected in ("Example CPU", "2.13.0+cpu", "torch finds no CUDA or HIP device", *SKIPPED.values()):
        assert expected in text


@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("dark", [False, True])
def test_nothing_is_wider_than_the_window(browser: Browser, path: Path, width: int, dark: bool) -> None:
    browser.open(path, width, dark)
    assert browser.run("document.documentElement.scrollWidth") <= width
    assert browser.run("document.documentElement.dataset.theme") == ("dark" if dark else "light")
    chart = browser.run(f"document.querySelector('{LASD} .chart svg').getBoundingClientRect().width")
    assert 0.7 * width < chart + 120
    assert chart < width
    assert browser.problems == []


def test_the_theme_is_switched(opened: Browser) -> None:
    before = opened.run("getComputedStyle(document.body).backgroundColor")
    opened.click("#theme")
    assert opened.run("getComputedStyle(document.body).backgroundColor") != before


def test_results_with_nothing_in_them_make_a_page(browser: Browser, tmp_path: Path) -> None:
    """A run that was stopped at once, and one where every cell was skipped."""
    full = example_results()
    for table in full.tables:
        for cell in table.cells:
            cell.value, cell.skipped = None, 'a reason with </script> and "quotes"'
    empty = Results(full.environment, full.options, full.started)
    for results in (empty, full):
        path = tmp_path / "report.html"
        path.write_text(page(results), encoding="utf-8")
        browser.open(path, 1280)
        assert browser.problems == []
    assert 'a reason with </script> and "quotes"' in browser.run("document.querySelector('#skipped').innerText")


def test_results_without_times_show_memory(browser: Browser, tmp_path: Path) -> None:
    """As a dry run for a GPU gives them."""
    results = example_results()
    results.tables = [table for table in results.tables if table.suite == "lasd" and table.metric == "memory"]
    path = tmp_path / "report.html"
    path.write_text(page(results), encoding="utf-8")
    browser.open(path, 1280)
    assert browser.problems == []
    assert browser.run(f"document.querySelector('{LASD} [data-value=memory]').ariaPressed") == "true"
    assert browser.run(f"document.querySelector('{LASD} [data-value=speed]').disabled") is True
    assert len(curves(browser)) == 10


def test_size(path: Path) -> None:
    assert path.stat().st_size < LARGEST
