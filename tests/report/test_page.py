"""The page, as a file and in a real browser."""

import json
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any, ClassVar

import pytest

from lightning_memsave import ConfigurationError, MemoryBreakdown, MemoryPrediction
from lightning_memsave.prediction.result import ModuleMemory, TensorMemory, Timeline
from lightning_memsave.report.page import CATEGORIES, write_page
from lightning_memsave.units import format_bytes
from tests.helpers import full_disk
from tests.report.chromium import Chromium
from tests.report.page_data import NUM_BLOCKS, ladder

EVIL = (
    "</script x><script>window.hacked = 1</script><!-- <img src=x onerror=hacked=1> &amp; \"'$style"
)


def tiny(name: str = "Net", **fields: Any) -> MemoryPrediction:
    return MemoryPrediction(
        **{"device": "cpu", "model": name, "peak": MemoryBreakdown(100), "by_phase": {}, **fields}
    )


def data_in(page: Path) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page.read_text())
    assert found
    return json.loads(found[1])


class TestFile:
    def test_holds_the_given_figures(self, tmp_path):
        predictions = ladder()
        found = data_in(write_page(tmp_path / "page.html", predictions))
        assert [p["name"] for p in found["predictions"]] == [name for name, _ in predictions]
        for drawn, (_, given) in zip(found["predictions"], predictions, strict=True):
            plain = given.to_dict()
            same = set(plain) - {"modules", "largest_tensors"}
            assert {key: drawn[key] for key in same} == {key: plain[key] for key in same}
            whole = sum((module.memory for module in given.modules), MemoryBreakdown())
            first = drawn["modules"][0]
            assert MemoryBreakdown.from_categories(first["memory"]) == whole
            assert first["num_parameters"] == given.num_parameters

    def test_knows_every_category(self):
        beyond_tensors = {"cuda_context", "allocator_slack"}
        assert set(CATEGORIES) == set(MemoryBreakdown().by_category()) | beyond_tensors

    def test_needs_nothing_else(self, tmp_path):
        page = write_page(tmp_path / "page.html", ladder()[:1]).read_text()
        assert set(re.findall(r"https?://[^\"'\s]+", page)) <= {"http://www.w3.org/2000/svg"}
        assert re.findall(r"<link|@import|url\(|\ssrc=", page) == []
        assert "default-src 'none'" in page

    def test_is_small_for_a_deep_model(self, tmp_path):
        pages = [write_page(tmp_path / f"{n}.html", ladder()[:n]) for n in (1, 5)]
        one, five = (page.stat().st_size for page in pages)
        assert (five - one) / 4 < 150_000

    def test_is_the_same_each_time(self, tmp_path):
        a, b = (write_page(tmp_path / name, ladder()[:1]) for name in ("a.html", "b.html"))
        assert a.read_bytes() == b.read_bytes()

    def test_gives_the_path(self, tmp_path):
        path = tmp_path / "page.html"
        assert write_page(str(path), [("plain", tiny())]) == path
        assert path.exists()

    def test_makes_no_folder_that_was_not_there(self, tmp_path):
        with pytest.raises(ConfigurationError, match=r"typo/page\.html'.* for example 'memory"):
            write_page(tmp_path / "typo" / "page.html", [("plain", tiny())])
        assert list(tmp_path.iterdir()) == []

    def test_a_full_disk_keeps_the_older_page(self, tmp_path):
        path = write_page(tmp_path / "page.html", [("older", tiny())])
        older = path.read_bytes()
        with full_disk(), pytest.raises(ConfigurationError, match="File too large"):
            write_page(path, [("newer", tiny())])
        assert path.read_bytes() == older
        assert list(tmp_path.iterdir()) == [path]

    def test_can_be_read_without_javascript(self, tmp_path):
        page = write_page(tmp_path / "page.html", [("a<b", tiny())]).read_text()
        assert "<tr><th>a&lt;b</th><td>100 B</td></tr>" in page


class TestBadInput:
    @pytest.mark.parametrize(
        ("predictions", "remedy"),
        [
            ([], r"Pass for example `\[\(\"plain\""),
            ([("a", tiny()), ("a", tiny())], "its own name"),
        ],
    )
    def test_is_refused_and_nothing_written(self, tmp_path, predictions, remedy):
        with pytest.raises(ConfigurationError, match=remedy):
            write_page(tmp_path / "page.html", predictions)
        assert not (tmp_path / "page.html").exists()

    def test_a_folder_is_no_file(self, tmp_path):
        with pytest.raises(ConfigurationError, match=r"for example 'memory\.html'"):
            write_page(tmp_path, [("plain", tiny())])


class TestColours:
    # Machado et al. (2009), A Physiologically-based Model for Simulation of Color Vision
    # Deficiency, each kind in full.
    EYES: ClassVar[dict[str, Any]] = {
        "all colours": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
        "protanopia": (
            (0.152286, 1.052583, -0.204868),
            (0.114503, 0.786281, 0.099216),
            (-0.003882, -0.048116, 1.051998),
        ),
        "deuteranopia": (
            (0.367322, 0.860646, -0.227968),
            (0.280085, 0.672501, 0.047413),
            (-0.011820, 0.042940, 0.968881),
        ),
        "tritanopia": (
            (1.255528, -0.076749, -0.178779),
            (-0.078411, 0.930809, 0.147602),
            (0.004733, 0.691367, 0.303900),
        ),
    }

    @pytest.mark.parametrize("eyes", EYES)
    @pytest.mark.parametrize("theme", ["light", "dark"])
    def test_stay_apart(self, tmp_path, theme, eyes):
        page = write_page(tmp_path / "page.html", [("plain", tiny())]).read_text()
        pairs = re.findall(r"--(\w+): light-dark\((#\w{6}), (#\w{6})\)", page)
        colours = {name: light if theme == "light" else dark for name, light, dark in pairs}
        # The two that are no tensors are hatched.
        solid = [c for c in CATEGORIES if c not in {"cuda_context", "allocator_slack"}]
        seen = {c: self.lab(colours[c], self.EYES[eyes]) for c in solid}
        for a, b in combinations(solid, 2):
            distance = sum((x - y) ** 2 for x, y in zip(seen[a], seen[b], strict=True)) ** 0.5
            assert distance > 20, (a, b)

    @staticmethod
    def lab(colour: str, eyes: Any) -> tuple[float, float, float]:
        srgb = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        light = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in srgb]

        def through(matrix: Any, values: list[float]) -> list[float]:
            return [sum(m * v for m, v in zip(row, values, strict=True)) for row in matrix]

        light = [min(1.0, max(0.0, c)) for c in through(eyes, light)]
        xyz = through(
            ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505)), light
        )
        ratios = [value / white for value, white in zip(xyz, (0.9505, 1, 1.089), strict=True)]
        f = [r ** (1 / 3) if r > 0.008856 else 7.787 * r + 16 / 116 for r in ratios]
        return 116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])


@pytest.fixture(scope="module")
def predictions() -> list[tuple[str, MemoryPrediction]]:
    return ladder()


@pytest.fixture(scope="module")
def capacity(predictions) -> int:
    """Of a card that is enough from the fourth setting on."""
    return (predictions[2][1].device_bytes + predictions[3][1].device_bytes) // 2


@pytest.fixture
def page(browser, predictions, capacity, tmp_path) -> Iterator[Chromium]:
    path = write_page(tmp_path / "page.html", predictions, device_capacity_bytes=capacity)
    browser.open(path)
    yield browser
    assert browser.errors == []
    assert browser.requests == [path.as_uri()]


def bytes_in(page: Chromium, selector: str) -> list[int]:
    return page.run(
        f"[...document.querySelectorAll({json.dumps(selector)})].map(e => Number(e.dataset.bytes))"
    )


def texts_in(page: Chromium, selector: str) -> list[str]:
    return page.run(
        f"[...document.querySelectorAll({json.dumps(selector)})].map(e => e.textContent)"
    )


def subtree(prediction: MemoryPrediction, name: str) -> MemoryBreakdown:
    inside = [
        m.memory
        for m in prediction.modules
        if not name or m.name == name or m.name.startswith(f"{name}.")
    ]
    return sum(inside, MemoryBreakdown())


class TestHeadline:
    def test_says_what_is_needed_and_whether_it_fits(self, page, predictions, capacity):
        for index, (name, prediction) in enumerate(predictions):
            page.run(f"show({index})")
            [verdict] = texts_in(page, ".verdict")
            spare = capacity - prediction.device_bytes
            assert format_bytes(prediction.device_bytes) in verdict
            fits = f"✓ Fits the {format_bytes(capacity)} GPU"
            assert (fits if spare >= 0 else "✕ Does not fit") in verdict
            assert format_bytes(abs(spare)) in verdict
            assert name in texts_in(page, ".subject")[0]
            assert page.run("document.querySelector('#setting').selectedOptions[0].text") == name

    # Gradients are not alive at the peak, which is in the forward pass.
    def test_bytes_of_a_parameter_count_its_gradient(self, browser, tmp_path):
        held = {"parameter_bytes": 400, "optimizer_state_bytes": 800}
        forward = MemoryBreakdown(**held, activation_bytes=1000)
        backward = MemoryBreakdown(**held, gradient_bytes=400)
        shown = tiny(
            peak=forward,
            by_phase={"forward": forward, "backward": backward},
            modules=(ModuleMemory("", "Net", 100, forward),),
        )
        browser.open(write_page(tmp_path / "page.html", [("plain", shown)]))
        (fact,) = (text for text in texts_in(browser, ".facts .more") if "bytes each" in text)
        assert fact.startswith("16.0 bytes each")

    def test_points_at_the_first_setting_that_fits(self, page):
        assert "2 of 5 settings fit; the first is + bfloat16" in texts_in(page, ".others")[0]
        page.click(".others .link")
        assert "Fits" in texts_in(page, ".verdict")[0]
        assert texts_in(page, ".others") == []

    def test_parts_of_the_gauge_are_to_scale(self, page, predictions):
        _, first = predictions[0]
        widths = page.run(
            "Object.fromEntries([...document.querySelectorAll('.gauge .part')]"
            ".map(e => [e.className, parseFloat(e.style.width)]))"
        )
        assert sum(widths.values()) == pytest.approx(100, abs=0.01)
        share = 100 * first.peak.activation_bytes / first.device_bytes
        assert widths["part c-activation"] == pytest.approx(share, abs=0.01)
        slack = first.device_bytes - first.context_bytes - first.peak_bytes
        assert widths["part c-allocator_slack"] == pytest.approx(
            100 * slack / first.device_bytes, abs=0.01
        )

    def test_bytes_are_written_as_in_python(self, page):
        rng = random.Random(5)
        numbers = [rng.randrange(2 ** rng.randrange(1, 45)) for _ in range(2000)]
        numbers += [n * 2**27 for n in range(1, 99)] + [-n * 2**7 for n in range(1, 99)]
        assert page.run(f"{numbers}.map(formatBytes)") == [format_bytes(n) for n in numbers]


class TestComparison:
    def test_bars_are_to_scale(self, page, predictions):
        most = max(prediction.device_bytes for _, prediction in predictions)
        widths = page.run(
            "[...document.querySelectorAll('.bar-row .track')].map(track => Object.fromEntries("
            "[...track.querySelectorAll('.part')]"
            ".map(e => [e.className, parseFloat(e.style.width)])))"
        )
        for parts, (_, prediction) in zip(widths, predictions, strict=True):
            assert sum(parts.values()) == pytest.approx(100 * prediction.device_bytes / most, 1e-4)
            state = 100 * prediction.peak.optimizer_state_bytes / most
            assert parts["part c-optimizer_state"] == pytest.approx(state, 1e-4)

    def test_a_bar_chooses_what_is_shown_below(self, page, predictions):
        page.click(".bar-row[data-index='3']")
        pressed = page.run("[...document.querySelectorAll('.bar-row')].map(e => e.ariaPressed)")
        assert pressed == ["false", "false", "false", "true", "false"]
        peak = predictions[3][1].peak_bytes
        assert f"peak {format_bytes(peak)}" in texts_in(page, ".peak text")

    def test_marks_what_fits(self, page):
        assert texts_in(page, ".bar-value")[0].endswith("does not fit")
        assert texts_in(page, ".bar-value")[3].endswith("✓ fits")

    def test_is_left_out_for_one_setting(self, browser, tmp_path):
        browser.open(write_page(tmp_path / "page.html", [("plain", tiny())]))
        assert browser.run("document.querySelector('#comparison').hidden")
        assert browser.run("document.querySelector('#chooser').hidden")
        assert browser.run("document.querySelector('#timeline').hidden")
        assert browser.errors == []


class TestTimeline:
    def box(self, page: Chromium) -> tuple[float, float, float, float]:
        page.run("document.querySelector('.plot').scrollIntoView({block: 'center'})")
        return page.run(
            "(() => { const r = document.querySelector('.plot').getBoundingClientRect();"
            "return [r.x, r.y, r.width, r.height]; })()"
        )

    @pytest.mark.parametrize("share", [0.0, 0.2, 0.4, 0.77, 1.0])
    def test_hover_shows_the_bytes_at_that_point(self, page, predictions, share):
        timeline = predictions[0][1].timeline
        x, y, width, height = self.box(page)
        index = min(int(share * len(timeline.phases)), len(timeline.phases) - 1)
        inner = width - 64 - 10
        page.point(x + 64 + (index + 0.5) * inner / len(timeline.phases), y + height / 2)
        shown = page.run(
            "Object.fromEntries([...document.querySelectorAll('.tip tr')].map("
            "r => [r.dataset.category, Number(r.querySelector('.bytes').dataset.bytes)]))"
        )
        assert shown == {k: v[index] for k, v in timeline.by_category.items() if any(v)}
        [total, *_] = bytes_in(page, ".tip p .bytes")
        assert total == sum(v[index] for v in timeline.by_category.values())
        head = texts_in(page, ".tip p")[0]
        assert f"in {timeline.phases[index]}" in head
        assert f"point {index + 1} of {len(timeline.phases)}" in head
        left, right, page_width = page.run(
            "(() => { const r = document.querySelector('.tip').getBoundingClientRect();"
            "return [r.left, r.right, innerWidth]; })()"
        )
        assert 0 <= left < right <= page_width

    def test_leaving_hides_the_tooltip(self, page):
        x, y, width, height = self.box(page)
        page.point(x + width / 2, y + height / 2)
        assert not page.run("document.querySelector('.tip').hidden")
        page.point(x + width / 2, y - 30)
        assert page.run("document.querySelector('.tip').hidden")

    def test_areas_end_at_the_sums(self, page, predictions):
        prediction = predictions[0][1]
        peak = page.run(
            "(() => { const c = document.querySelector('.peak circle');"
            "return [c.cx.baseVal.value, c.cy.baseVal.value]; })()"
        )
        ticks = page.run(
            "[...document.querySelectorAll('.tick')].map(t => [t.textContent,"
            " t.y.baseVal[0].value - 4])"
        )
        (_, zero), (label, first) = ticks[0], ticks[1]
        gib = (zero - peak[1]) / (zero - first) * float(label.removesuffix(" GiB"))
        assert gib == pytest.approx(prediction.peak_bytes / 2**30, rel=1e-3)
        tops = page.run(
            "Object.fromEntries([...document.querySelectorAll('.area')].map(a => "
            "[a.dataset.category, a.getBBox().y]))"
        )
        assert min(tops.values()) == pytest.approx(peak[1], abs=0.1)

    def test_phases_have_their_peaks(self, page, predictions):
        prediction = predictions[0][1]
        rows = page.run(
            "[...document.querySelectorAll('#phase-table tbody tr')].map(r => "
            "[r.cells[0].textContent, Number(r.cells[1].firstChild.dataset.bytes)])"
        )
        assert rows == [[k, v.total_bytes] for k, v in prediction.by_phase.items()]
        assert texts_in(page, ".phase-name") == ["forward", "backward", "optimizer"]

    def test_says_when_another_step_is_drawn(self, browser, tmp_path):
        (_, large), *_, (_, small) = ladder()
        drawn = replace(large, timeline=small.timeline)
        browser.open(write_page(tmp_path / "page.html", [("x", drawn)]))
        assert "The chart shows a step with a peak of" in texts_in(browser, "#timeline .hint")[0]


class TestModules:
    def test_rows_are_the_sums_of_what_is_inside(self, page, predictions):
        prediction = predictions[0][1]
        rows = page.run(
            "[...document.querySelectorAll('#module-table tbody tr')].map(r => ({"
            "label: r.querySelector('.module-name').textContent,"
            "count: Number(r.querySelector('[data-parameters]').dataset.parameters),"
            "total: Number(r.querySelector('.total [data-bytes]').dataset.bytes),"
            "parts: Object.fromEntries([...r.querySelectorAll('[data-category]')].map("
            "c => [c.dataset.category, Number(c.firstChild.dataset.bytes)]))}))"
        )
        by_label = {row["label"]: row for row in rows}
        names = {"(whole model)": "", "transformer": "transformer", "h": "transformer.h"}
        for label, name in (
            names | {f"0-{NUM_BLOCKS - 1}": "transformer.h", "wte": "transformer.wte"}
        ).items():
            row, memory = by_label[label], subtree(prediction, name)
            assert row["total"] == memory.total_bytes
            given = memory.by_category()
            assert row["parts"] == {k: given[k] for k in row["parts"]}
        assert rows[0]["count"] == prediction.num_parameters
        assert rows[0]["total"] == prediction.peak_bytes

    def test_what_belongs_to_no_module_is_said(self, browser, tmp_path):
        shown = tiny(modules=(ModuleMemory("", "Net", 100, MemoryBreakdown(60)),))
        browser.open(write_page(tmp_path / "page.html", [("plain", shown)]))
        assert "40 B belong to no module" in texts_in(browser, "#modules .hint")[0]

    def test_names_the_part_with_most(self, browser, tmp_path):
        inside = (("", 0), (".mlp", 45), (".norm", 5))
        blocks = [(f"h.{i}{name}", size) for i in (0, 1) for name, size in inside]
        shown = tiny(
            modules=tuple(
                ModuleMemory(name, name[4:], 1, MemoryBreakdown(size))
                for name, size in (("", 0), ("h", 0), *blocks)
            )
        )
        browser.open(write_page(tmp_path / "page.html", [("plain", shown)]))
        [finding] = texts_in(browser, "#modules .finding")
        assert finding == "h.0-1.mlp has 90 % of the memory of all modules."


class TestOddOnes:
    """What an engine or a JSON file may give as well."""

    @pytest.mark.parametrize(
        "fields",
        [
            {"timeline": Timeline(("forward",), {"parameter": (100,)})},
            {"timeline": Timeline(("forward", "backward"), {"parameter": (0, 0)}, 1)},
            {"timeline": Timeline(("a", "b") * 300, {"input": tuple(range(600))}, 599)},
            {"modules": (ModuleMemory("a.b.c", "Linear", 3, MemoryBreakdown(12)),)},
            {"modules": (ModuleMemory("", "Net", 0, MemoryBreakdown()),)},
            {"peak": MemoryBreakdown(), "by_phase": {"forward": MemoryBreakdown()}},
            {"largest_tensors": (TensorMemory("unheard_of", 7),)},
            {"device": "cuda", "reserved_bytes": 50, "context_bytes": 9},
            {"peak": MemoryBreakdown(host_bytes=7)},
        ],
        ids=lambda fields: next(iter(fields)),
    )
    def test_are_drawn_without_a_complaint(self, browser, tmp_path, fields):
        settings = [("a", tiny(**fields)), ("b", tiny())]
        browser.open(write_page(tmp_path / "page.html", settings, device_capacity_bytes=60))
        browser.run("[0, 1, 0].forEach(show)")
        assert browser.errors == []
        shown = browser.run("document.querySelector('main').innerText")
        assert not re.search(r"NaN|undefined|Infinity|\[object|null", shown)

    def test_a_card_is_called_by_its_name(self, browser, tmp_path):
        path = tmp_path / "page.html"
        name = "RTX-3060-12GB"
        write_page(path, [("a", tiny())], device_capacity_bytes=2**30, device_name=name)
        browser.open(path)
        assert browser.errors == []
        assert texts_in(browser, ".limit-label") == [name]
        assert f"Fits the {name} (1.00 GiB)" in texts_in(browser, ".verdict")[0]


class TestTensors:
    def test_equal_ones_of_each_block_are_one_line(self, page, predictions):
        tensors = predictions[0][1].largest_tensors
        assert sum(bytes_in(page, "#tensor-table .total .bytes")) == sum(
            t.num_bytes for t in tensors
        )
        rows = texts_in(page, "#tensor-table tbody tr")
        blocks = [t for t in tensors if t.module.endswith("mlp.act") and t.op == "aten.tanh"]
        times = f"{NUM_BLOCKS} \N{MULTIPLICATION SIGN} {format_bytes(blocks[0].num_bytes)}"
        (row,) = (row for row in rows if "transformer.h.*.mlp.act" in row and "tanh" in row)
        assert times in row


class TestLooks:
    BACKGROUND = "getComputedStyle(document.querySelector('section')).backgroundColor"

    def test_follows_the_system(self, page):
        fill = "getComputedStyle(document.querySelector('.area.c-parameter')).fill"
        page.prefer("light")
        assert page.run(self.BACKGROUND) == "rgb(255, 255, 255)"
        light = page.run(fill)
        page.prefer("dark")
        assert page.run(self.BACKGROUND) == "rgb(24, 28, 35)"
        assert page.run(fill) != light

    def test_paper_is_white(self, page):
        page.prefer("dark")
        page.send("Emulation.setEmulatedMedia", media="print")
        assert page.run(self.BACKGROUND) == "rgb(255, 255, 255)"
        assert page.run("getComputedStyle(document.querySelector('.bar')).display") == "none"
        page.send("Emulation.setEmulatedMedia", media="")

    @pytest.mark.parametrize("width", [360, 768, 1600])
    def test_fits_the_width(self, page, width):
        page.resize(width, 800)
        page.draw()
        assert page.run("document.documentElement.scrollWidth") <= width
        inside = page.run(
            "document.querySelector('.plot svg').getBoundingClientRect().width"
            " - document.querySelector('.plot').clientWidth"
        )
        assert abs(inside) <= 1

    def test_everything_has_a_name_for_who_cannot_see_it(self, page):
        nameless = page.run(
            "[...document.querySelectorAll('button, input, select, [role=img], [tabindex=\"0\"]')]"
            ".filter(e => !(e.ariaLabel || e.textContent.trim() || e.labels?.length))"
            ".map(e => e.outerHTML.slice(0, 90))"
        )
        assert nameless == []


class TestNames:
    def test_code_in_names_is_only_text(self, browser, tmp_path):
        prediction = tiny(
            EVIL,
            modules=(
                ModuleMemory("", EVIL, 0, MemoryBreakdown()),
                ModuleMemory(EVIL.replace(".", ""), EVIL, 5, MemoryBreakdown(100)),
            ),
            largest_tensors=(TensorMemory("parameter", 100, EVIL, EVIL, "forward", (5, 5), EVIL),),
            peak_phase="forward",
            peak_module=EVIL,
            peak_op=EVIL,
            timeline=Timeline(("forward", EVIL), {"parameter": (100, 50)}),
            by_phase={EVIL: MemoryBreakdown(100)},
            settings={EVIL: EVIL},
            assumptions=(EVIL, "\ud800"),
            guesses=(EVIL,),
        )
        page = write_page(
            tmp_path / "page.html",
            [(EVIL, prediction), ("b", tiny())],
            title=EVIL,
            notes=[EVIL, "one_long_word" * 50],
        )
        browser.open(page)
        assert browser.errors == []
        assert browser.requests == [page.as_uri()]
        assert browser.run("window.hacked") is None
        assert texts_in(browser, "h1") == [EVIL]
        assert browser.run("document.title") == EVIL
        assert EVIL in texts_in(browser, "#remarks li")
        assert browser.run("document.documentElement.scrollWidth") <= 1200
        assert EVIL.replace(".", "") in texts_in(browser, "#modules .module-name")

    def test_injected_code_would_not_run(self, page):
        page.run(
            "{ const s = document.createElement('script'); s.textContent = 'window.hacked = 1';"
            "document.body.append(s); }"
        )
        assert page.run("window.hacked") is None
        # Chromium reports what the policy refused; that is what is wanted here.
        assert all("Content Security Policy" in error for error in page.errors)
        page.errors.clear()
