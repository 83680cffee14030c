"""The live page in a real browser: what it shows of an outage and of a blocked loop, quietly, and for everybody."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from servers import base

pytestmark = pytest.mark.timeout(240)

PROGRAM = Path(__file__).with_name("watched_program.py")
AXE = Path(__file__).with_name("vendor") / "axe.min.js"
SIZES = {"wide": (1280, 900), "phone": (390, 844)}


@pytest.fixture(scope="module")
def browser():
    """Debian's Chromium, driven by playwright; without it the tests are skipped, and under CI they fail."""
    try:
        sync_api = pytest.importorskip("playwright.sync_api")
        program = base.apt_program("chromium", "chromium")
    except base.UnavailableError as error:
        base.MISSING["Chromium"] = str(error)
        if os.environ.get("CI"):
            pytest.fail(f"Chromium cannot be had, and CI demands it: {error}")
        pytest.skip(f"Chromium cannot be had: {error}")
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield chromium
        chromium.close()


class Program:
    """The program that is watched, in a process of its own."""

    def __init__(self, runtime):
        self.runtime = runtime
        self.process = subprocess.Popen(
            [sys.executable, str(PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "XDG_RUNTIME_DIR": runtime},
        )
        self.url = self.process.stdout.readline().strip()

    def say(self, word):
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()

    def end(self):
        self.say("end")
        self.process.stdin.close()
        self.process.wait(60)
        self.process.stdout.close()


@pytest.fixture(scope="module")
def program():
    with tempfile.TemporaryDirectory() as runtime:
        watched = Program(runtime)
        yield watched
        watched.end()


@pytest.fixture
def page(browser, program):
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    opened = context.new_page()
    opened.set_default_timeout(60_000)
    said = []
    opened.on("console", lambda message: said.append(message.text))
    opened.on("pageerror", lambda error: said.append(str(error)))
    opened.on("requestfailed", lambda request: said.append(request.url))
    opened.goto(f"{program.url}/ui")
    opened.wait_for_selector('#top[data-state="ok"]')
    yield opened
    assert said == []
    context.close()


def wait_until(page, expression, before=None):
    """Wait for a function of the page to be true; asked from outside, since the page's policy forbids `eval` inside."""
    for _ in range(1_200):
        if page.evaluate(f"(before) => {expression}", before):
            return
        page.wait_for_timeout(50)
    raise AssertionError(f"never true: {expression}")


def shown(page, selector="body"):
    return page.inner_text(selector)


def test_numbers_and_charts_move(page):
    wait_until(page, "document.querySelectorAll('#cards dd')[0].textContent.endsWith('/s')")
    wait_until(page, "/[1-9]/.test(document.querySelector('#l-flow b').textContent)")
    drawn = "document.querySelector('#c-flow canvas').toDataURL()"
    wait_until(page, f"{drawn} !== before", page.evaluate(drawn))
    assert re.search(r"in [\d,]+, delivered", page.get_attribute("#c-flow", "aria-label"))
    assert {"rows", "clicks", "warehouse"} <= set(re.findall(r"\w+", page.locator("#graph").text_content()))
    assert "All is well" in shown(page, "#sentence")


def test_a_stopped_destination_turns_red_within_two_frames_and_comes_back_green(page, program):
    # Frames come once a second; the breaker needs two failures in a row, a fraction of one.
    page.evaluate("window.frames_ = 0; new EventSource('events').onmessage = () => window.frames_++")
    wait_until(page, "window.frames_ > 0")
    program.say("stop")
    before = page.evaluate("window.frames_")
    page.wait_for_selector('#top[data-state="down"]')
    assert page.evaluate("window.frames_") - before <= 3
    page.wait_for_selector(".node.down")
    assert "Exporter warehouse can't deliver" in shown(page, "#sentence")
    assert "connection to warehouse:5432 refused" in shown(page, "#problems")
    assert "What to do" in shown(page, "#problems")
    program.say("go")
    page.wait_for_selector('#top[data-state="ok"]')
    assert "exporter warehouse works again" in shown(page, "#events")


@pytest.mark.parametrize("least", [0.00096, 9.7e-7, 1e-4])
def test_any_least_latency_can_be_drawn(browser, program, least):
    """The lines of a logarithmic axis are counted up from it, which from some values never ended."""
    context = browser.new_context()
    page = context.new_page()
    said = []
    page.on("pageerror", lambda error: said.append(str(error)))
    page.add_init_script(
        """const parse = JSON.parse;
        JSON.parse = (text) => {
          const frame = parse(text);
          for (const queue of frame.queues || []) queue.wait_p50 = LEAST;
          for (const values of frame.length ? frame : []) values[6] = LEAST;
          return frame;
        };""".replace("LEAST", str(least))
    )
    page.goto(f"{program.url}/ui")
    wait_until(page, "document.querySelector('#c-latency').getAttribute('aria-label')")
    page.wait_for_timeout(200)  # it is drawn after the step that has the label
    context.close()
    assert said == []


def test_the_lag_is_shown_while_the_loop_is_blocked(page, program):
    program.say("block 6")
    page.wait_for_selector("#lag.bad")
    assert "is blocked" in shown(page, "#problems")
    page.wait_for_selector("#lag:not(.bad)")


@pytest.mark.parametrize("colours", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_it_is_accessible_and_fits(browser, program, size, colours):
    width, height = SIZES[size]
    context = browser.new_context(
        viewport={"width": width, "height": height}, color_scheme=colours, bypass_csp=True, reduced_motion="reduce"
    )
    page = context.new_page()
    page.goto(f"{program.url}/ui")
    page.wait_for_selector("#queues td")
    page.wait_for_selector('#top[data-state="ok"]')
    page.click("#pause")
    page.add_script_tag(path=str(AXE))
    found = page.evaluate("axe.run()")["violations"]
    assert [(each["id"], [node["html"][:120] for node in each["nodes"]]) for each in found] == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    context.close()


def test_everything_can_be_reached_by_keyboard(page):
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "pause"
    page.keyboard.press("Enter")
    assert page.get_attribute("#pause", "aria-pressed") == "true"
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    assert page.get_attribute("html", "data-theme") == "light"
    page.keyboard.press("Enter")
    assert page.get_attribute("html", "data-theme") == "dark"
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "graph"


def test_the_line_that_puts_dead_letters_back_does_so_while_it_runs(page, program):
    """The last one: what was given up is news for minutes."""
    program.say("poison")
    page.wait_for_selector("#put-back code")
    assert "run here, as the user of this process" in shown(page, "#put-back-note")
    line = shown(page, "#put-back code")
    assert line in shown(page, "#problems")
    name, *arguments = shlex.split(line)
    assert name == "batchqueue"
    ended = subprocess.run(
        [sys.executable, "-m", "batchqueue_async.cli.main", *arguments],
        env={**os.environ, "XDG_RUNTIME_DIR": program.runtime},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert re.fullmatch(r"[1-9]\d* dead letters put into the queue again, by process \d+\n", ended.stdout)
