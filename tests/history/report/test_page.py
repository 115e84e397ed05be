"""The page in Chromium, with the network cut."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime, timedelta
from importlib import resources
from pathlib import Path

import pytest
from selenium.webdriver import Chrome

from dibs.history.report import summary, write
from tests.history.report import lakes
from tests.history.report.looking import DESKTOP, PHONE, Looking

SIZES = pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])

Open = Callable[..., Looking]


@pytest.fixture
def look(chromium: Chrome, tmp_path: Path) -> Open:
    """Writes a lake's page and opens it."""

    def opened(lake: Path, size: tuple[int, int] = DESKTOP, fragment: str = "") -> Looking:
        return Looking(chromium, write(summary(lake), tmp_path / "report.html"), size, fragment=fragment)

    return opened


class TestSight:
    """What one sees."""

    @SIZES
    def test_every_chart_is_drawn_and_nothing_complains(
        self, look: Open, busy: Path, size: tuple[int, int], tmp_path: Path
    ) -> None:
        """Each canvas has lines in it, the console is empty, and the page does not scroll sideways."""
        page = look(busy, size)
        page.picture(tmp_path / "report.png")
        assert len(page.drawn()) == 6
        assert all(colours > 2 for colours in page.drawn())
        assert not page.too_wide()
        assert page.console() == []

    @SIZES
    @pytest.mark.parametrize("made", [lakes.quiet_lake, lakes.empty_lake], ids=["quiet", "empty"])
    def test_little_or_nothing_is_a_page_too(
        self, look: Open, made: Callable[[Path], Path], size: tuple[int, int], tmp_path: Path
    ) -> None:
        """A lake without errors, and one that knows nothing, say so."""
        page = look(made(tmp_path / "lake"), size)
        page.picture(tmp_path / "report.png")
        nothing = made is lakes.empty_lake
        said = "Nothing here yet" if nothing else "No delivery ended with an error."
        assert said in page.text("main")
        assert nothing or all(colours > 2 for colours in page.drawn())
        assert not page.too_wide()
        assert page.console() == []

    def test_a_lake_of_one_moment_is_drawn(self, look: Open, tmp_path: Path) -> None:
        """One minute of one queue is a dot in every chart."""
        minute = lakes.HORIZON.replace(second=0)
        lake = lakes.write_lake(
            tmp_path / "lake", {"queue_minutes": [lakes.minute(minute)]}, began=minute, horizon=minute
        )
        page = look(lake)
        assert page.tiles()["Arrived"] == "3"
        assert page.console() == []

    def test_gaps_are_said_and_shaded(self, look: Open, tmp_path: Path) -> None:
        """Events that were trimmed before they were read are told on top."""
        day = lakes.HORIZON.replace(hour=0, minute=0)
        gap = {"shard": 3, "after": day + timedelta(hours=9), "until": day + timedelta(hours=11)}
        page = look(lakes.busy_lake(tmp_path / "lake", lakes.KINDS[:1], gaps=[gap]))
        assert "1 gap: events were trimmed" in page.text(".notice")
        assert "Sat 14 Nov 09:00 to Sat 14 Nov 11:00 (shard 3)" in page.text(".notice")
        assert page.console() == []

    def test_numbers_of_a_chart_are_a_table(self, look: Open, busy: Path) -> None:
        """Whoever does not see a chart can read it."""
        page = look(busy)
        page.click("[data-chart=flow] summary")
        page.await_one("[data-chart=flow] th")
        head = page.texts("[data-chart=flow] th")
        assert head == ["From (UTC)", "arrived", "completed", "retried", "failed", "lost leases"]
        arrived = [int(text.replace(",", "")) for text in page.texts("[data-chart=flow] td:nth-child(2)")]
        assert f"{sum(arrived):,}" == page.tiles()["Arrived"]

    def test_advice_is_a_sentence(self, look: Open, busy: Path) -> None:
        """The hour, the queue, what it needed and what ran."""
        said = look(busy).text("#advice li")
        assert re.search(
            r"At Sat 14 Nov \d\d:00 resize of acme needed \d+ workers for a p95 wait under 2 s; 1 ran", said
        )

    def test_colours_can_be_told_from_their_ground(self) -> None:
        """Texts have a contrast of 4.5 to 1 in both themes, lines of 3 to 1."""
        style = (resources.files("dibs.history.report") / "assets" / "page.css").read_text()
        colours = {name: both for name, *both in re.findall(r"--(\w+): light-dark\((#\w{6}), (#\w{6})\);", style)}
        texts = {"ink", "dim", "arrived", "completed", "retried", "failed", "needed"}
        for name in colours.keys() - {"page", "card", "line", "edge", "hover"}:
            for theme in (0, 1):
                assert _contrast(colours[name][theme], colours["card"][theme]) >= (4.5 if name in texts else 3), name


class TestChoices:
    """What one can choose."""

    @SIZES
    def test_a_queue_and_a_tenant_change_everything(self, look: Open, busy: Path, size: tuple[int, int]) -> None:
        """Headline, charts, advice, errors, workers, tenants and slowest tasks are of what was chosen."""
        page = look(busy, size)
        parts = ("#headline", "#advice", "#queues", "#errors", "#workers", "#tenants", "#slowest", "[data-chart=wait]")
        before = {part: page.text(part) for part in parts}
        page.choose("tenant", "globex")
        of_tenant = {part: page.text(part) for part in parts}
        assert [part for part in parts if of_tenant[part] == before[part]] == []
        page.choose("queue", "mail.send")
        of_queue = {part: page.text(part) for part in parts}
        assert [part for part in parts if of_queue[part] == of_tenant[part]] == []
        assert page.texts("#slowest td:nth-child(1)")[0].split() == ["mail.send", "globex"]
        page.choose("queue", "")
        page.choose("tenant", "")
        assert {part: page.text(part) for part in parts} == before
        assert not page.too_wide()
        assert page.console() == []

    def test_a_tenants_queues_are_the_ones_to_choose_from(self, look: Open, busy: Path) -> None:
        """A queue that the tenant does not have is not offered, and not kept."""
        page = look(busy)
        page.choose("queue", "resize")
        page.choose("tenant", "globex")
        assert page.texts("#queue option") == ["all", "mail.send", "report"]
        assert page.script("return document.getElementById('queue').value") == ""

    def test_a_link_keeps_the_choice(self, look: Open, busy: Path) -> None:
        """The address holds what was chosen; a name that is not there is ignored."""
        page = look(busy)
        page.click("#queues .link")
        assert page.script("return location.hash") == "#tenant=acme&queue=resize"
        again = look(busy, fragment="#tenant=acme&queue=resize&theme=dark")
        assert again.script("return document.getElementById('queue').value") == "resize"
        assert look(busy, fragment="#tenant=nobody&queue=nothing").tiles()["Arrived"] == look(busy).tiles()["Arrived"]

    def test_dark_follows_the_system_unless_it_is_chosen(self, look: Open, busy: Path) -> None:
        """Page and charts change their colours."""
        page = look(busy)
        light = page.background()
        page.prefer("dark")
        dark = page.background()
        assert dark != light
        page.choose("theme", "light")
        assert page.background() == light
        page.prefer("light")
        page.choose("theme", "dark")
        assert page.background() == dark
        assert all(colours > 2 for colours in page.drawn())
        assert page.console() == []

    def test_zoom_and_percentile_change_the_charts(self, look: Open, busy: Path) -> None:
        """The buttons do what they say, and say what is on."""
        page = look(busy)
        picture = "return document.querySelector('[data-chart=wait] canvas').toDataURL()"
        whole = page.script(picture)
        page.click("#zoom button:last-child")
        hour = page.script(picture)
        page.click("[data-chart=wait] [data-percentile=p50]")
        assert len({whole, hour, page.script(picture)}) == 3
        assert page.script("return document.querySelectorAll('#zoom [aria-pressed=true]').length") == 1

    def test_slowest_by_wait(self, look: Open, busy: Path) -> None:
        """The longest run is not the longest wait."""
        page = look(busy)
        by_run = page.text("#slowest")
        page.click("[data-by=wait]")
        assert page.text("#slowest") != by_run
        page.click("#slowest .more-button")
        assert len(page.texts("#slowest tbody tr")) == 20


class TestHostile:
    """Names and texts are the tasks' own."""

    NASTY = (
        "</script><script>document.title='owned'</script>",
        "<img src=x onerror=\"document.title='owned'\">",
        "'\"`&amp;$policy ${document.title='owned'}",
        "\u202eevil\u2066 \u0007\x1b[31m\u2028\u2029 \U0001f4a5\ufffd",
        "x" * 10_000,
    )

    @SIZES
    def test_texts_stay_texts(self, look: Open, size: tuple[int, int], tmp_path: Path) -> None:
        """Nothing runs, nothing is loaded, nothing pushes the page aside, and one can read what it was."""
        page = look(_nasty_lake(tmp_path / "<b>lake", self.NASTY, lakes.HORIZON), size)
        page.picture(tmp_path / "report.png")
        assert not page.too_wide()
        assert page.script("return document.title") == "<b>lake: history"
        assert page.script("return document.querySelectorAll('img').length") == 0
        assert page.script("return document.scripts.length") == 3
        samples = page.script("return [...document.querySelectorAll('.sample')].map((one) => one.textContent)")
        assert set(self.NASTY[:4]) < set(samples)
        assert max(map(len, samples)) < 500
        for text in self.NASTY[:4]:
            assert page.script("return document.body.textContent.includes(arguments[0])", text)
        page.choose("queue", self.NASTY[0])
        assert page.tiles()["Arrived"] == "3"
        assert not page.too_wide()
        assert page.console() == []

    def test_nothing_can_be_fetched(self, look: Open, busy: Path) -> None:
        """The page's policy refuses whatever a script might ask for, and inline code that is not its own."""
        page = look(busy)
        page.script("const made = document.createElement('script'); made.text = 'document.title = `owned`';"
                    "document.body.append(made); new Image().src = 'http://127.0.0.1:9/x.png';")  # fmt: skip
        refused = page.script("return fetch('http://127.0.0.1:9/').then(() => 'came', () => 'refused')")
        assert refused == "refused"
        assert page.script("return document.title") == "shop-lake: history"
        assert any("Content Security Policy" in line for line in page.console())


def _contrast(one: str, other: str) -> float:
    dark, light = sorted(map(_luminance, (one, other)))
    return (light + 0.05) / (dark + 0.05)


def _luminance(colour: str) -> float:
    """As WCAG has it."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _nasty_lake(path: Path, texts: tuple[str, ...], at: datetime) -> Path:
    """A lake in which every name and text is one of those."""
    day = at.date()
    minute = at.replace(second=0)
    fault = {"error_type": "Error", "count": 5, "tasks": 2, "deaths": 1, "first_seen": at, "last_seen": at, "date": day}
    worker = {"deliveries": 3, "completions": 3, "failures": 0, "lost": 0, "releases": 0, "busy_ms": 900, "date": day,
              "first_seen": at, "last_seen": at}  # fmt: skip
    task = {"ended_at": at, "outcome": "completed", "deliveries": 1, "wait_ms": 5, "run_ms": 300, "date": day}
    tenant = {"arrivals": 3, "deliveries": 3, "completions": 3, "failures": 0, "busy_ms": 900, "wait_ms": 15,
              "wait_mean_ms": 5.0, "date": day}  # fmt: skip
    hour = {"hour": at.replace(minute=0, second=0), "workers_ran": 1, "wait_p95_ms": 5000.0, "workers_needed": 4,
            "date": day}  # fmt: skip
    tables = {
        "queue_minutes": [lakes.minute(minute, text, text) for text in texts],
        "error_groups": [
            {**fault, "tenant": text, "fingerprint": text, "error_type": text, "sample": text, "sample_id": text,
             "commands": [text]} for text in texts
        ],
        "workers": [{**worker, "tenant": text, "command": text, "worker": text} for text in texts],
        "tenants": [{**tenant, "tenant": text} for text in texts],
        "tasks": [
            {**task, "tenant": text, "command": text, "id": text, "worker": text, "error_type": text} for text in texts
        ],
        "capacity": [{**hour, "tenant": text, "command": text} for text in texts],
    }  # fmt: skip
    return lakes.write_lake(path, tables, began=at - timedelta(hours=1), horizon=at)
