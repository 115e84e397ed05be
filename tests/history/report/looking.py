"""A page in a browser, as the tests look at it."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import Select, WebDriverWait

DESKTOP = (1440, 900)
PHONE = (390, 844)

_DRAWN = """
return [...document.querySelectorAll("canvas")].map((canvas) => {
  const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext("2d", { willReadFrequently: true });
  copy.drawImage(canvas, 0, 0);
  const pixels = copy.getImageData(0, 0, canvas.width, canvas.height).data;
  const seen = new Set();
  for (let at = 0; at < pixels.length; at += 4) if (pixels[at + 3] > 200) seen.add(pixels.slice(at, at + 3).join());
  return seen.size;
});
"""


class Looking:
    """An open page at one size. The network is cut before it is opened."""

    def __init__(self, chromium: Chrome, page: Path, size: tuple[int, int], *, fragment: str = "") -> None:
        self._chromium = chromium
        self._width, height = size
        metrics = {"width": self._width, "height": height, "deviceScaleFactor": 1, "mobile": size == PHONE}
        offline = {"offline": True, "latency": 0, "downloadThroughput": 0, "uploadThroughput": 0}
        self._do("Emulation.setDeviceMetricsOverride", metrics)
        self._do("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": "light"}]})
        self._do("Network.enable", {})
        self._do("Network.emulateNetworkConditions", offline)
        chromium.get("about:blank")
        self.console()
        chromium.get(page.as_uri() + fragment)

    def script(self, text: str, *arguments: Any) -> Any:
        """What a script in the page returns."""
        return self._chromium.execute_script(text, *arguments)

    def console(self) -> list[str]:
        """What the console got since it was last asked."""
        return [line["message"] for line in self._chromium.get_log("browser")]  # type: ignore[no-untyped-call]

    def text(self, selector: str) -> str:
        """What one can read in the first element of that name."""
        return str(self._chromium.find_element(By.CSS_SELECTOR, selector).text)

    def texts(self, selector: str) -> list[str]:
        """What one can read in each element of that name."""
        return [str(found.text) for found in self._chromium.find_elements(By.CSS_SELECTOR, selector)]

    def tiles(self) -> dict[str, str]:
        """The headline numbers by their names."""
        return dict(zip(self.texts(".tile .label"), self.texts(".tile .value"), strict=True))

    def click(self, selector: str) -> None:
        """Clicks the first element of that name."""
        found = self._chromium.find_element(By.CSS_SELECTOR, selector)
        self.script("arguments[0].scrollIntoView({block: 'center'})", found)
        found.click()

    def await_one(self, selector: str) -> None:
        """Returns once there is an element of that name."""
        WebDriverWait(self._chromium, 10).until(lambda chromium: chromium.find_elements(By.CSS_SELECTOR, selector))

    def choose(self, name: str, value: str) -> None:
        """Chooses a value of the filter of that name."""
        Select(self._chromium.find_element(By.ID, name)).select_by_value(value)

    def prefer(self, scheme: str) -> None:
        """The system changes to light or dark."""
        self._do("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]})
        WebDriverWait(self._chromium, 10).until(
            lambda _: self.script("return matchMedia('(prefers-color-scheme: dark)').matches") == (scheme == "dark")
        )

    def background(self) -> str:
        """The colour of the page."""
        return str(self.script("return getComputedStyle(document.body).backgroundColor"))

    def drawn(self) -> list[int]:
        """For each chart, how many different opaque colours are in its picture."""
        return [int(size) for size in self.script(_DRAWN)]

    def too_wide(self) -> bool:
        """Whether the page can be scrolled sideways."""
        return bool(self.script("return document.documentElement.scrollWidth > arguments[0]", self._width))

    def picture(self, path: Path) -> None:
        """Keeps a picture of the whole page."""
        size = self.script("return [innerWidth, document.documentElement.scrollHeight]")
        clip = {"x": 0, "y": 0, "width": size[0], "height": size[1], "scale": 1}
        taken = self._do("Page.captureScreenshot", {"captureBeyondViewport": True, "clip": clip})
        path.write_bytes(base64.b64decode(taken["data"]))

    def _do(self, command: str, arguments: dict[str, Any]) -> Any:
        return self._chromium.execute_cdp_cmd(command, arguments)
