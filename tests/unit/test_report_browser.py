"""The page in a real browser: no errors, no sideways scrolling, readable in light and dark, sortable by keyboard."""

from __future__ import annotations

import html
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from _report_runs import SICK, Simulated, troubled
from test_report import HOSTILE, hostile_run

from fp8dist.report import build_report

webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium")
from selenium.webdriver.chrome.service import Service  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402

CHROMIUM = shutil.which("chromium")
DRIVER = shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None,
    reason="needs chromium and chromedriver (Debian: chromium, chromium-driver)",
)
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
)  # fmt: skip
RUNS = ("healthy", "troubled", "hostile", "sparse")

# Text whose colour stands out too little from what is behind it, by the formula of WCAG 2.
FAINT = """
const linear = c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
const parse = text => (text.match(/[\\d.]+/g) || []).map(Number);
const light = c => 0.2126 * linear(c[0] / 255) + 0.7152 * linear(c[1] / 255) + 0.0722 * linear(c[2] / 255);
const contrast = (a, b) => (Math.max(light(a), light(b)) + 0.05) / (Math.min(light(a), light(b)) + 0.05);
function behind(element) {
  for (; element; element = element.parentElement) {
    const c = parse(getComputedStyle(element).backgroundColor);
    if (c.length === 3 || c[3] === 1) return c;
  }
  return [255, 255, 255];
}
const faint = [];
let seen = 0;
for (const element of document.body.querySelectorAll("*")) {
  const own = [...element.childNodes].some(n => n.nodeType === 3 && n.data.trim());
  if (!own || element.closest("title, desc, script") || !element.getClientRects().length) continue;
  const style = getComputedStyle(element);
  const drawn = element instanceof SVGElement;
  let back = behind(element);
  if (element.classList.contains("on")) {
    const kind = [...element.classList].find(n => n.endsWith("-ink")).replace("-ink", "");
    back = parse(getComputedStyle(document.querySelector("rect." + kind)).fill);
  }
  seen += 1;
  const ratio = contrast(parse(drawn ? style.fill : style.color), back);
  if (ratio < 4.5) faint.push([element.tagName, element.className.baseVal || element.className, ratio]);
}
return [seen, faint];
"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("report")
    Simulated().write(folder / "healthy")
    troubled().write(folder / "troubled")
    hostile_run(folder / "hostile")
    Simulated().write(folder / "sparse", flight=False, metrics=True)
    for path in (folder / "sparse").glob("monitor-*"):
        path.unlink()
    found = {}
    for name in RUNS:
        found[name] = folder / name / "report.html"
        found[name].write_text(build_report(folder / name).html, encoding="utf-8")
    return found


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    driver.set_page_load_timeout(30)
    driver.set_script_timeout(30)
    yield driver
    driver.quit()


def show(browser: Any, page: Path, width: int = 1280, scheme: str = "light") -> None:
    screen = {"width": width, "height": 844, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    browser.get(page.as_uri())


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_no_page_scrolls_sideways_or_logs_an_error(
    browser: Any, pages: dict[str, Path], name: str, scheme: str, width: int
) -> None:
    show(browser, pages[name], width, scheme)
    assert browser.execute_script("return document.documentElement.scrollWidth <= window.innerWidth")
    assert browser.execute_script("return window.innerWidth") == width
    assert browser.get_log("browser") == []


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_text_stands_out_from_what_is_behind_it(
    browser: Any, pages: dict[str, Path], name: str, scheme: str
) -> None:
    show(browser, pages[name], scheme=scheme)
    seen, faint = browser.execute_script(FAINT)
    assert seen > 30 and faint == []


def test_dark_and_light_differ(browser: Any, pages: dict[str, Path]) -> None:
    colours = []
    for scheme in ("light", "dark"):
        show(browser, pages["healthy"], scheme=scheme)
        colours.append(browser.execute_script("return getComputedStyle(document.body).backgroundColor"))
    assert colours == ["rgb(255, 255, 255)", "rgb(20, 23, 27)"]


@pytest.mark.parametrize("width", [390, 1280])
def test_the_verdicts_are_visible_without_scrolling(browser: Any, pages: dict[str, Path], width: int) -> None:
    show(browser, pages["troubled"], width)
    lines = browser.find_elements(By.CSS_SELECTOR, "ul.verdicts li")
    said = [line.text for line in lines if line.text.startswith("Problem")]
    assert len(said) == 3 and all(line.is_displayed() for line in lines)
    assert f"{SICK} saturates: 0.8% of its values" in said[1]
    assert "Rank 2 on host b is the one the others wait for" in said[2]
    assert all(line.rect["y"] + line.rect["height"] < 844 for line in lines[:3])


def column(browser: Any, table: Any, number: int) -> list[str]:
    script = "return [...arguments[0].tBodies[0].rows].map(r => r.cells[arguments[1]].textContent.trim())"
    return browser.execute_script(script, table, number)


def test_a_table_sorts_by_mouse_and_by_keyboard(browser: Any, pages: dict[str, Path]) -> None:
    show(browser, pages["troubled"])
    table = browser.find_element(By.CSS_SELECTOR, "#waits table")
    assert column(browser, table, 0) == ["0", "1", "2 late", "3"]
    wait = table.find_elements(By.CSS_SELECTOR, "thead button")[1]
    wait.click()
    assert column(browser, table, 0)[-1] == "2 late"
    wait.send_keys(Keys.ENTER)  # the other way round
    assert column(browser, table, 0)[0] == "2 late"
    assert table.find_elements(By.CSS_SELECTOR, "th[aria-sort]")[0].get_attribute("aria-sort") == "ascending"
    table = browser.find_element(By.CSS_SELECTOR, "#slots table")
    headroom = next(
        b for b in table.find_elements(By.CSS_SELECTOR, "thead button") if b.text.startswith("headroom")
    )
    headroom.click()
    assert column(browser, table, 0)[-1].startswith(SICK)


def test_every_part_can_be_reached_by_the_tab_key(browser: Any, pages: dict[str, Path]) -> None:
    show(browser, pages["troubled"], 390)
    reached = set()
    for _ in range(80):
        browser.switch_to.active_element.send_keys(Keys.TAB)
        script = "const e = document.activeElement; return e.closest('section')?.id || e.tagName"
        reached.add(browser.execute_script(script))
    assert {"losses", "scales", "slots", "waits", "timeline", "faults", "A"} <= reached


@pytest.mark.parametrize("name", RUNS)
def test_pictures_and_tables_are_described(browser: Any, pages: dict[str, Path], name: str) -> None:
    show(browser, pages[name])
    script = """
    const bare = [];
    for (const svg of document.querySelectorAll("svg"))
      if (!svg.querySelector(":scope > title")?.textContent || !svg.querySelector(":scope > desc")?.textContent)
        bare.push("svg");
    for (const table of document.querySelectorAll("table"))
      if (!table.caption || [...table.rows].some(row => !row.querySelector("th[scope]"))) bare.push(table.caption);
    for (const box of document.querySelectorAll(".scroll, pre"))  // Safari gives the focus to none by itself
      if (box.tabIndex !== 0 || !box.hasAttribute("tabindex")) bare.push("box");
    for (const link of document.querySelectorAll("a"))
      if (!document.querySelector(link.getAttribute("href"))) bare.push(link.href);
    const ids = [...document.querySelectorAll("[id]")].map(e => e.id);
    if (new Set(ids).size !== ids.length) bare.push("ids");
    return [document.documentElement.lang, document.querySelectorAll("svg").length, bare];
    """
    language, count, bare = browser.execute_script(script)
    assert language == "en" and count >= 1 and bare == []


def test_everything_is_there_without_scripts(browser: Any, pages: dict[str, Path]) -> None:
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        show(browser, pages["troubled"])
        root = browser.execute_cdp_cmd("DOM.getDocument", {"depth": 0})["root"]["nodeId"]
        page = html.unescape(browser.execute_cdp_cmd("DOM.getOuterHTML", {"nodeId": root})["outerHTML"])
    finally:
        browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})
    assert "<button" not in page
    assert f"{SICK} saturates: 0.8%" in page and page.count("<svg") == 6


def test_hostile_names_are_shown_as_they_are_and_run_nothing(browser: Any, pages: dict[str, Path]) -> None:
    show(browser, pages["hostile"])  # an alert would make every later command fail
    assert browser.execute_script("return document.scripts.length + document.images.length") == 1
    shown = browser.find_element(By.ID, "slots").text
    for text in HOSTILE[:4]:
        assert f"{text}.input" in shown
