"""A page in a browser: it runs a module of this repository, and returns the module's result."""

import json
import queue
import shutil
import subprocess
import threading
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

ROOT = Path(__file__).parents[2]
TIMEOUT = 60  # seconds
OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
)
PAGE = b"""<!doctype html><meta charset=utf-8><script type=module>
const given = new URLSearchParams(location.search);
const result = async () => {
  try {
    return await (await import(given.get("module"))).run(...given.getAll("argument"));
  } catch (error) {
    return String(error.stack);
  }
};
await fetch("/result", { method: "POST", body: JSON.stringify(await result()) });
</script>"""


def find_browser():
    """The path of a Chromium; None if there is none."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class _Handler(SimpleHTTPRequestHandler):
    """The files of the repository, the pages, and the place where their results go."""

    def __init__(self, pages, results, *connection):
        self.pages = pages
        self.results = results
        super().__init__(*connection, directory=ROOT)

    def do_GET(self):
        page = self.pages.get(urlsplit(self.path).path)
        if page is not None:
            self._respond(page)
        else:
            super().do_GET()

    def do_POST(self):
        self.results.put(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        self._respond(b"")

    def _respond(self, body):
        self.send_response(200)
        self.send_header("content-type", "text/html")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        """Nothing is said."""


class Page:
    """It comes from `origin`."""

    def __init__(self, origin, pages, results):
        self.origin = origin
        self._pages = pages
        self._results = results

    def run(self, browser, profile, module, *arguments):
        """What the module's `run` gives, for these texts; `profile` is a folder for the browser."""
        query = urlencode({"module": f"/{module.relative_to(ROOT)}", "argument": arguments}, doseq=True)
        return self._open(browser, profile, f"/?{query}")

    def show(self, browser, profile, path, content):
        """The result that this page at this path posts."""
        self._pages[path] = content.encode()
        return self._open(browser, profile, path)

    def _open(self, browser, profile, path):
        command = [browser, *OPTIONS, f"--user-data-dir={profile}", self.origin + path]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            try:
                return self._results.get(timeout=TIMEOUT)
            finally:
                process.terminate()


@contextmanager
def served_page():
    """A page on loopback."""
    pages = {"/": PAGE}
    results: queue.Queue[Any] = queue.Queue()
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Handler, pages, results)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield Page(f"http://127.0.0.1:{server.server_port}", pages, results)
        server.shutdown()
