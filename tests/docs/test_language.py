"""The pages and the package have none of the phrases in FORBIDDEN, which make sentences hard to read.

Code is exempt: fenced blocks and `inline code`, in pages and in docstrings.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "trioengine"
FORBIDDEN = {  # phrase: how to say it instead
    r"\bfor\s+ever\b": "forever, endlessly, or the missing bound",
    r"\b(?i:(?:no|some|any)body|who(?:m|so)?ever)\b": "the task, client, caller or user that is meant",
    r",\s+too\b(?!\s+(?:big|early|few|large|late|little|long|many|much|short|small))": "also, as well",
    r"(?<![Tt]here\s)\bis\s+no(?:ne)?\b(?!\s+longer)": "is not a …",
    r"\bthose\s+of\b": "the noun itself",
    r"\b(?:tells|told|says|said)\b": "a program reports, contains, lists, names, sends, is configured",
    r"(?:^|[.:;]\s+)[Ww]ho\s+(?:gives|has|is|leaves|may|waits|was)\b": "a subject: the client that …",
    r"(?<![.?!]\s)\bwhat\b(?!\s+(?:are|did|do|does|happens|is|was|would)\b[^.;]*\?)(?!\s+happens\b)": "a noun",
    r"(?:^|[.:;|]\s+)What\b(?![^.]*\?)": "a noun",
}
_CODE = re.compile(r"```.*?```|``[^`]+``|`[^`]+`", re.DOTALL)


def without_code(text: str) -> str:
    """Replace code by a sign, and keep the numbers of the lines."""
    return _CODE.sub(lambda match: "$" + "\n" * match[0].count("\n"), text)


def texts_of_python(source: str) -> Iterator[tuple[int, str]]:
    """Yield the comments, docstrings and other strings of a module, each with the number of its first line."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def texts_of(path: Path) -> Iterator[tuple[int, str]]:
    source = path.read_text()
    return texts_of_python(source) if path.suffix == ".py" else iter([(1, source)])


def findings(path: Path) -> list[str]:
    """Return a line for each forbidden phrase: file, line, the phrase and its remedy."""
    found = []
    for first, text in texts_of(path):
        prose = without_code(text)
        for phrase, remedy in FORBIDDEN.items():
            for match in re.finditer(phrase, prose, re.MULTILINE):
                line = first + prose.count("\n", 0, match.start())
                words = " ".join(match[0].split())
                found.append(f"{path}:{line}: {words!r}; better: {remedy}")
    return found


def pages() -> list[Path]:
    docs = ROOT / "docs"
    return [
        ROOT / "README.md",
        *sorted(path for kind in ("*.md", "*.py", "*.html", "*.mjs", "*.ts") for path in docs.rglob(kind)),
    ]


@pytest.mark.parametrize("path", pages(), ids=lambda path: str(path.relative_to(ROOT)))
def test_pages(path: Path) -> None:
    assert findings(path) == []


def packages() -> list[Path]:
    return [path for path in sorted(PACKAGE.iterdir()) if path.is_dir() or path.suffix == ".py"]


@pytest.mark.parametrize("path", packages(), ids=lambda path: path.name)
def test_packages(path: Path) -> None:
    files = [path] if path.is_file() else sorted(path.rglob("*.py"))
    assert [line for file in files for line in findings(file)] == []


PROSE = {
    "It waits for\never.": "for ever",
    "Whoever leaves": "Whoever",
    "It is closed, too.": ", too",
    "A file that is no model.": "is no",
    "A slot; who waits gets it.": "; who waits",
    "The log says why.": "says",
    "It drops what is left.": "what",
    "What is left is dropped.": "What",
}


@pytest.mark.parametrize("text", PROSE)
def test_a_phrase_is_found_with_its_place(text: str, tmp_path: Path) -> None:
    for name, source in (("page.md", f"# Title\n\n{text}\n"), ("module.py", f'x = 1\n\ny = """{text}"""\n')):
        (path := tmp_path / name).write_text(source)
        line = text.count("\n", 0, text.find(PROSE[text].split()[0])) + 3
        (finding,) = findings(path)
        assert finding.startswith(f"{path}:{line}: {PROSE[text]!r}; better: ")


@pytest.mark.parametrize(
    "text",
    [
        "```\nwhat is told, for ever\n```",
        "the line `it says what` in a log",
        "Too many sessions, too long prompts.",
        "There is no worker, so it is no longer used.",
        "What is the capital of France? It shows what happens.",
    ],
)
def test_code_and_plain_words_are_not_found(text: str, tmp_path: Path) -> None:
    (path := tmp_path / "page.md").write_text(text)
    assert findings(path) == []
