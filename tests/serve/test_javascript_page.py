"""The page at the top of docs/websocket.md, in a browser; the version and the types of the JavaScript client."""

import json
import re
import shutil
import subprocess
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import trio
from helpers.browser import find_browser, served_page
from helpers.loopback import on_loopback
from helpers.realtime_texts import assistant, reference, user

from trioengine import __version__

DOCS = Path(__file__).parents[2] / "docs"
EAGER = """<script>
document.querySelector("form").requestSubmit();  // before the module runs
const done = new Promise((resolve) => {
  window.WebSocket = class extends WebSocket {
    constructor(...options) {
      super(...options);
      this.addEventListener("message", ({ data }) => JSON.parse(data).type === "response.done" && setTimeout(resolve));
    }
  };
});
</script>"""
DRIVER = """<script type="module">
const { first, second } = EXPECTED;
const form = document.querySelector("form"), output = document.querySelector("pre");
const [ask, stop] = form.querySelectorAll("button");
const shown = (isIt) => new Promise((resolve) => {
  const look = () => isIt(output.textContent) && resolve(output.textContent);
  new MutationObserver(look).observe(output, { childList: true, characterData: true, subtree: true });
  look();
});
const question = (text) => {
  form.question.value = text;
  ask.click();
};
const results = [];
question("hello");
results.push(await shown((text) => text === first));
await done;
question("one");
question("two");
await shown((text) => text !== "" && text !== first);
stop.click();
question("three");
question("four");
results.push(await shown((text) => text === second));
results.push(location.search);
await fetch("/result", { method: "POST", body: JSON.stringify(results) });
</script>"""


def example():
    """The first block of the page."""
    return re.search(r"```(\w+)\n(.*?)```", (DOCS / "websocket.md").read_text(), re.DOTALL).groups()


def test_the_example_is_a_file_as_well():
    head = '<!doctype html>\n<meta charset="utf-8">\n<title>trioengine</title>\n'
    assert (DOCS / "chat.html").read_text() == head + example()[1]


async def test_the_example_runs_in_a_browser(tmp_path):
    """Asked again and again, and stopped, it shows the answers of the last question alone, and is never submitted."""
    browser = find_browser()
    if browser is None:
        pytest.skip("no Chromium")
    language, page = example()
    assert language == "html"
    with served_page() as served:
        async with on_loopback() as server:
            expected = partial(reference, SimpleNamespace(engine=server.engine), max_tokens=256)
            first = expected([user("hello")])
            second = expected([user("hello"), assistant(first), user("four")])
            assert first and second and first != second
            page = page.replace("ws://127.0.0.1:8000", f"ws://127.0.0.1:{server.port}")
            page = page.replace("</form>", "</form>" + EAGER)
            driver = DRIVER.replace("EXPECTED", json.dumps({"first": first, "second": second}))
            show = partial(served.show, browser, tmp_path, "/docs/page.html", f"<!doctype html>{page}{driver}")
            assert await trio.to_thread.run_sync(show) == [first, second, ""]


def test_the_version_is_that_of_the_package():
    (version,) = re.findall(r'^export const VERSION = "(.*)";', (DOCS / "trioengine.mjs").read_text(), re.MULTILINE)
    assert version == __version__


def exports(name):
    declaration = r"^export (?:async )?(?:const|function|class) (\w+)"
    return sorted(re.findall(declaration, (DOCS / name).read_text(), re.MULTILINE))


def members(name, of, declaration):
    """The public names in the body of a class."""
    (body,) = re.findall(rf"^export class {of}\b.*?{{\n(.*?)^}}", (DOCS / name).read_text(), re.MULTILINE | re.DOTALL)
    return set(re.findall(declaration, body.partition("  // ---- called by")[0], re.MULTILINE))


def test_the_types_have_the_names_of_the_module():
    assert exports("trioengine.d.ts") == exports("trioengine.mjs")
    session = members("trioengine.mjs", "Session", r"^  (?:async |get )?(\w+)(?: = .*|\(.*\) {)$") - {"constructor"}
    assert members("trioengine.d.ts", "Session", r"^  (?:readonly )?(\w+)[(:]") - {"constructor"} == session
    declared = members("trioengine.d.ts", "Generation", r"^  (?:readonly )?(\w+)[(:]")
    assert declared == {"text", "response", "tool_calls", "isOver", "isCancelled", "over", "cancel", "result"}


USE = """
import { connect, Session, TrioengineError, VERSION, type Entry, type Message } from "./trioengine.mjs";
const session: Session = await connect("ws://localhost", { keepPartial: true, onState: (state) => state === "awake" });
const generation = session.generate("x", { temperature: 0 }, { keepPartial: false });
for await (const text of generation) text.length;
const history: Entry[] = session.history;
const messages: Message[] = history.filter((entry) => "role" in entry);
const tools = [{ type: "function" as const, name: "weather", parameters: { type: "object" } }];
const { tool_calls } = await session.generate("x", { tools, tool_choice: "required" }).result();
session.generate(tool_calls.map(({ call_id }) => ({ call_id, output: "sunny" })));
// @ts-expect-error
session.generate([{ output: "sunny" }]);
await connect("ws://localhost", { history });
const error = new TrioengineError({ code: "x", message: VERSION });
const tokens: number | undefined = (await generation.result()).usage?.total_tokens;
// @ts-expect-error
session.generate("x", { temperatur: 0 });
void [messages, error.retryAfter, tokens];
"""


def compiler():
    """The command of TypeScript's compiler, where it is installed or in the cache of npm."""
    npm, tsc = shutil.which("npm"), shutil.which("tsc")
    if tsc is None and npm is not None:
        command = [npm, "exec", "--offline", "--yes", "--package=typescript", "--", "tsc"]
        if subprocess.run([*command, "--version"], capture_output=True).returncode == 0:
            return command
    return None if tsc is None else [tsc]


@pytest.mark.parametrize("module", ["nodenext", "esnext"])
def test_typescript_takes_the_types(module, tmp_path):
    command = compiler()
    if command is None:
        pytest.skip("no TypeScript")
    for name in ("trioengine.mjs", "trioengine.d.ts", "trioengine.d.mts"):
        shutil.copy(DOCS / name, tmp_path)
    (tmp_path / "use.mts").write_text(USE)
    resolution = ["--moduleResolution", "bundler" if module == "esnext" else module]
    options = ["--noEmit", "--strict", "--target", "es2022", "--lib", "es2022,dom", "--module", module, *resolution]
    checked = subprocess.run([*command, *options, "use.mts"], cwd=tmp_path, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout
