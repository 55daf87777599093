"""A headless Chromium for tests of what people open in a browser; says why when there is none."""

from __future__ import annotations

import contextlib
import http.server
import importlib.util
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

BINARIES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def missing() -> str:
    """Why no browser can be driven here; "" when one can."""
    if importlib.util.find_spec("selenium") is None:
        return "selenium is not installed (pip install selenium)"
    if not any(map(shutil.which, BINARIES)):
        return "no Chromium on this machine (apt-get install chromium chromium-driver)"
    if shutil.which("chromedriver") is None:
        return "no chromedriver on this machine (apt-get install chromium-driver)"
    return ""


@contextlib.contextmanager
def browser(width: int = 1280, height: int = 900) -> Iterator:
    """A Selenium driver of a fresh headless Chromium, closed at the end."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = next(filter(None, map(shutil.which, BINARIES)))
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(flag)
    options.add_argument(f"--window-size={width},{height}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    driver.set_script_timeout(90)
    try:
        yield driver
    finally:
        driver.quit()


@contextlib.contextmanager
def served(folder: Path, extra: dict[str, bytes] | None = None) -> Iterator[str]:
    """``folder`` on a loopback address; ``extra`` adds paths. Yields the address."""
    more = extra or {}

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *arguments):
            super().__init__(*arguments, directory=str(folder))

        def log_message(self, *arguments) -> None:
            pass

        def do_GET(self) -> None:
            body = more.get(self.path)
            if body is None:
                super().do_GET()
                return
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
