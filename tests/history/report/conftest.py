"""Lakes that are made once, and a real browser."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service

from tests.history.report import lakes


@pytest.fixture(scope="session")
def busy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A lake of three days, with an incident."""
    return lakes.busy_lake(tmp_path_factory.mktemp("lakes") / "shop-lake")


@pytest.fixture(scope="session")
def chromium() -> Iterator[Chrome]:
    """Chromium without a screen, driven by the chromedriver of this machine: nothing is fetched."""
    found, driver = shutil.which("chromium"), shutil.which("chromedriver")
    assert found is not None, "the tests of the report's page need Chromium: make chromium"
    assert driver is not None, "the tests of the report's page need Chromium's driver: make chromium"
    options = ChromeOptions()
    options.binary_location = found
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--disable-background-networking",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    running = Chrome(options=options, service=Service(driver))
    yield running
    running.quit()
