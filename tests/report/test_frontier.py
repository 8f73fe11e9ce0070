"""The picture of plans on the page, in a real browser."""

import re
from itertools import pairwise
from typing import Any

import pytest

from lightning_memsave.planning.plan import MemoryPlan, Plan
from lightning_memsave.report.page import write_page
from tests.report.chromium import Chromium
from tests.report.test_page import EVIL, texts_in, tiny

GIB = 2**30


def plan_of(size: int, time_ratio: float, exactness: str, how: str, is_verified: bool) -> Plan:
    return Plan({}, how, exactness, size * GIB, size * GIB, time_ratio, is_verified)


PLANS = (
    plan_of(10, 0.9, "approximate", 'MemSaveCallback(optimizer="8bit")', True),
    plan_of(7, 1.1, "rounding", "MemSaveCallback(micro_batch_size=4)", True),
    plan_of(6, 1.105, "bitwise", "MemSaveCallback(activation_checkpointing=2)", False),
    plan_of(3, 1.4, "bitwise", 'MemSaveCallback("all")', False),
)
POINTS = """[...document.querySelectorAll('.point')].map(p => {
    const c = p.querySelector('.dot'), r = c.getBoundingClientRect();
    return {x: c.cx.baseVal.value, y: c.cy.baseVal.value, kind: p.getAttribute('class'),
            left: r.x + r.width / 2, top: r.y + r.height / 2, fill: getComputedStyle(c).fill}; })"""


def opened(browser: Chromium, folder: Any, plans: Any = PLANS, budget_bytes: int = 8 * GIB) -> None:
    found = MemoryPlan(budget_bytes, 0, plans[len(plans) > 1], None, tuple(plans))
    predictions = [("plan", tiny())]
    page = write_page(folder / "page.html", predictions, plan=found, unchanged_bytes=12 * GIB)
    browser.open(page)
    assert browser.errors == []
    browser.run("document.querySelector('.frontier').scrollIntoView({block: 'center'})")
    browser.draw()


def tip_of(browser: Chromium) -> str | None:
    hidden = browser.run("document.querySelector('.frontier .tip').hidden")
    return None if hidden else " ".join(texts_in(browser, ".frontier .tip p"))


def number(text: str) -> float:
    return float(re.sub(r"[^\d.]", "", text))


def test_points_are_to_scale(browser, tmp_path):
    opened(browser, tmp_path)
    unchanged, *plans = browser.run(POINTS)
    zero, top = browser.run(
        "[...document.querySelectorAll('.frontier .grid')].map(l => l.y1.baseVal.value)"
        ".filter((y, i, all) => i === 0 || i === all.length - 1)"
    )
    scale = (zero - top) / (number(texts_in(browser, ".frontier .tick")[-1]) * GIB)
    for point, plan in zip(plans, PLANS, strict=True):
        assert zero - point["y"] == pytest.approx(plan.device_bytes * scale, abs=0.1)
    assert zero - unchanged["y"] == pytest.approx(12 * GIB * scale, abs=0.1)
    across = (unchanged["x"] - plans[0]["x"]) / 0.1
    for point, plan in zip(plans, PLANS, strict=True):
        distance = (plan.time_ratio - 1) * across
        assert point["x"] - unchanged["x"] == pytest.approx(distance, abs=0.1)
    line = browser.run("document.querySelector('.budget line').y1.baseVal.value")
    assert zero - line == pytest.approx(8 * GIB * scale, abs=0.1)
    assert texts_in(browser, ".budget text") == ["budget 8.00 GiB"]
    assert all(a["x"] < b["x"] and a["y"] < b["y"] for a, b in pairwise(plans))
    ring = browser.run("document.querySelector('.ring').cx.baseVal.value")
    assert ring == pytest.approx(plans[1]["x"])


def test_a_budget_far_above_is_written_not_drawn(browser, tmp_path):
    opened(browser, tmp_path, budget_bytes=90 * GIB)
    assert texts_in(browser, ".budget text") == ["↑ budget 90.00 GiB"]
    assert browser.run("document.querySelector('.budget line')") is None


def test_colours_are_of_the_exactness_and_estimates_are_hollow(browser, tmp_path):
    opened(browser, tmp_path)
    swatches = browser.run(
        "[...document.querySelectorAll('#frontier .swatch')]"
        ".map(e => getComputedStyle(e).backgroundColor)"
    )
    assert texts_in(browser, "#frontier .legend li")[:3] == ["bitwise", "rounding", "approximate"]
    bitwise, rounding, approximate = swatches
    assert len({bitwise, rounding, approximate}) == 3
    card = browser.run("getComputedStyle(document.querySelector('section')).backgroundColor")
    _, *fills = [point["fill"] for point in browser.run(POINTS)]
    assert fills == [approximate, rounding, card, card]


@pytest.mark.parametrize("index", range(4))
def test_hover_shows_the_call(browser, tmp_path, index):
    opened(browser, tmp_path)
    point = browser.run(POINTS)[1 + index]
    browser.point(point["left"], point["top"])
    shown = tip_of(browser)
    assert PLANS[index].how in shown
    assert ("does not fit" in shown) == (index == 0)
    assert ("about" in shown) == (index > 1)
    assert shown.startswith("the plan: ") == (index == 1)
    browser.point(5, 5)
    assert tip_of(browser) is None


def test_the_keyboard_reaches_every_point(browser, tmp_path):
    opened(browser, tmp_path)
    browser.run("document.querySelector('.point').focus()")
    assert tip_of(browser) == "unchanged: 12.00 GiB, 1.00 \N{MULTIPLICATION SIGN} the time"
    for plan in PLANS:
        for kind in ("rawKeyDown", "keyUp"):
            browser.send(
                "Input.dispatchKeyEvent", type=kind, key="Tab", code="Tab", windowsVirtualKeyCode=9
            )
        assert plan.how in tip_of(browser)
        label = browser.run("document.activeElement.ariaLabel")
        assert plan.how in label
    browser.run("document.activeElement.blur()")
    assert tip_of(browser) is None


@pytest.mark.parametrize("width", [360, 768, 1600])
def test_fits_the_width(browser, tmp_path, width):
    opened(browser, tmp_path)
    browser.resize(width, 800)
    browser.draw()
    assert browser.run("document.documentElement.scrollWidth") <= width
    browser.run("document.querySelectorAll('.point')[4].focus()")
    box = "document.querySelector('.frontier .tip').getBoundingClientRect()"
    left, right = browser.run(f"[{box}.left, {box}.right]")
    assert 0 <= left < right <= width
    browser.resize(1200, 900)


def test_one_plan_that_is_the_unchanged_step(browser, tmp_path):
    opened(browser, tmp_path, [plan_of(12, 1.0, "bitwise", EVIL, True)])
    assert not re.search(
        r"NaN|undefined", browser.run("document.querySelector('#frontier').innerHTML")
    )
    assert EVIL in browser.run("document.querySelectorAll('.point')[1].ariaLabel")
    assert browser.run("window.hacked") is None


def test_without_plans_there_is_no_picture(browser, tmp_path):
    browser.open(write_page(tmp_path / "page.html", [("plain", tiny())]))
    assert browser.run("document.querySelector('#frontier').hidden")
