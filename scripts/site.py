"""Builds the documentation as a site that needs no network: `make docs`.

    python scripts/site.py                  # into build/site; fails on a warning or a dead link
    python scripts/site.py --sources        # only build/site-source, which mkdocs reads

Pages are the repository's Markdown files at their own paths, so that their links work here and on GitHub. Files that a
page links to are copied, too. The reference's pages are written from the code: commands, classes, protos, words.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import http.server
import importlib
import json
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

ROOT: Final = Path(__file__).resolve().parent.parent
FIRST: Final = (
    "README.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    *(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md")),
)
WIDTH: Final = 400  # pixels; the width of a phone
BROWSER_S_MAX: Final = 500  # seconds for all pages together
LINK: Final = re.compile(r"\]\(([^)#:\s]+)")
# server -> module that makes its command-line parser
SERVERS: Final = {
    "quire-allocator": ("quire_allocator.server", "make_parser"),
    "quire-gateway": ("quire_gateway.options", "make_parser"),
    "quire-worker": ("quire_worker.process.options", "make_parser"),
}
PACKAGES: Final = {"client": "quire", "kernels": "quire_kernels"}
# folder of a package -> page of the package, to which the site's links to the folder lead
PACKAGE_PAGES: Final = {"client/quire": "client.md", "worker_service/quire_kernels": "kernels.md"}
QUESTIONS: Final = "docs/faq.md"
# Beginning of a page's path -> the page's factor in the search. Records of the past have less, because they answer few
# questions.
SEARCH_FACTORS: Final = {
    QUESTIONS: 3,
    "docs/troubleshooting.md": 2,
    "reference/": 0.5,
    "benchmarks/": 0.3,
    "conformance/": 0.3,
    "integrations/": 0.3,
    "CONTRIBUTING.md": 0.3,
    "docs/dependencies.md": 0.3,
    "docs/decisions/": 0.1,
    "docs/bugs.md": 0.1,
    "CHANGELOG.md": 0.1,
    "STYLE.md": 0.1,
    "tests/": 0.1,
}


def linked(page: Path) -> Iterator[Path]:
    """Yields the files and folders of the repository that a page links to."""
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        path = (page.parent / target).resolve()
        if path.is_relative_to(ROOT) and path.exists():
            yield path


def reachable() -> set[Path]:
    """Returns all pages and everything that they link to, directly or through other pages."""
    found, left = set[Path](), [*(ROOT / name for name in FIRST), *(ROOT / "docs").glob("*.md")]
    while left:
        path = left.pop()
        if path not in found:
            found.add(path)
            left.extend(linked(path) if path.suffix == ".md" else ())
    return found


def as_markdown_reads_it(text: str) -> str:
    """Puts an empty line before lists and tables that follow a paragraph. Python's Markdown needs it, GitHub does
    not."""
    lines, before, is_code = [], "", False
    for line in text.splitlines():
        is_code ^= line.lstrip(" >").startswith("```")
        for opens in (r"- |\d+\. ", r"\|"):
            continues = re.match(rf" *(?:{opens}|$)|  |#", before)
            if not is_code and re.match(opens, line) and not continues:
                lines.append("")
        lines.append(line)
        before = line
    return "\n".join(lines) + "\n"


def stage(target: Path) -> None:
    """Writes all files that mkdocs reads."""
    shutil.rmtree(target, ignore_errors=True)
    for path in sorted(reachable()):
        copy = target / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            continue
        if path.suffix == ".md":
            name, text = str(path.relative_to(ROOT)), as_markdown_reads_it(with_folders(path))
            copy.write_text(search_factor(name) + (as_sections(text) if name == QUESTIONS else text), encoding="utf-8")
        else:
            shutil.copyfile(path, copy)
    for folder in (path for path in reachable() if path.is_dir() and not (path / "README.md").exists()):
        if str(folder.relative_to(ROOT)) not in PACKAGE_PAGES:
            listing(folder, target)
    for name, text in reference().items():
        page = target / "reference" / name
        page.parent.mkdir(exist_ok=True)
        page.write_text(search_factor(f"reference/{name}") + text, encoding="utf-8")


def search_factor(name: str) -> str:
    """Returns the lines before a page's text that tell the search how much its words count; nothing for most pages."""
    factors = (factor for beginning, factor in SEARCH_FACTORS.items() if name.startswith(beginning))
    return "".join(f"---\nsearch:\n  boost: {factor}\n---\n" for factor in factors)


def as_sections(text: str) -> str:
    """Returns the page of questions with a section for each row of its table, which the search finds by its title."""
    head, *rows = re.sub(r"^\| (?:question|---).*\n", "", text, flags=re.M).splitlines()
    cells = [[cell.strip() for cell in row.strip("| ").split(" | ")] for row in rows if row]
    return "\n\n".join([head, *(f"## {question}\n\n{answer}\nMore: {more}" for question, answer, more in cells)]) + "\n"


def with_folders(page: Path) -> str:
    """Returns a page with each link to a folder replaced by a link to the folder's page."""

    def named(match: re.Match[str]) -> str:
        path = (page.parent / match[1]).resolve()
        if not path.is_dir():
            return match[0]
        if (written := PACKAGE_PAGES.get(os.path.relpath(path, ROOT))) is not None:
            return f"]({os.path.relpath(ROOT / 'reference' / written, page.parent)}"
        return f"{match[0].rstrip('/')}/{'README.md' if (path / 'README.md').exists() else 'files.md'}"

    return LINK.sub(named, page.read_text(encoding="utf-8"))


def listing(folder: Path, target: Path) -> None:
    """Writes a page that lists a folder's files."""
    name = folder.relative_to(ROOT)
    tracked = subprocess.run(["git", "ls-files", "."], cwd=folder, capture_output=True, text=True, check=True)
    (target / name).mkdir(parents=True, exist_ok=True)
    files = "".join(f"- `{line}`\n" for line in tracked.stdout.splitlines())
    (target / name / "files.md").write_text(f"# Files of {name}\n\n{files}", encoding="utf-8")


def reference() -> dict[str, str]:
    """Returns the pages that are written from the code."""
    words = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8").split("\n## Words\n")[1]
    pages = {"commands.md": commands(), "glossary.md": f"# Glossary\n{words}"}
    for name, package in PACKAGES.items():
        pages[f"{name}.md"] = f"# The package `{package}`\n\n::: {package}\n"
    pages["kernels.md"] += section_of("quire_kernels.extra")
    pages["modules.md"] = "# Modules of `quire`\n" + "".join(map(section_of, further_modules()))
    for proto in sorted((ROOT / "protos").rglob("*.proto")):
        text = proto.read_text(encoding="utf-8")
        pages[f"{proto.stem}-proto.md"] = f"# {proto.name}\n\n```proto\n{text}```\n"
    return pages


def further_modules() -> list[str]:
    """Returns the modules that the docstring of `quire` names."""
    text = importlib.import_module("quire").__doc__ or ""
    return sorted(set(re.findall(r"\bquire\.[a-z]+", text)))


def section_of(module: str) -> str:
    """Returns a section with a module's public names."""
    return f"\n## {module}\n\n::: {module}\n    options:\n      heading_level: 3\n"


def commands() -> str:
    """Returns the page about the programs and their options."""
    from quire.cli.app import app
    from typer.main import get_command

    parts = ["# Commands\n", *command(get_command(app), "quire")]
    for name, (module, function) in SERVERS.items():
        parser: argparse.ArgumentParser = getattr(importlib.import_module(module), function)()
        parser.prog = name
        parts += [f"## {name}\n", f"{parser.description or ''}\n", *option_rows(parser)]
    return "\n".join(parts)


def command(found: Any, name: str) -> Iterator[str]:
    """Yields sections about a click command and its subcommands."""
    yield f"## {name}\n"
    yield f"{(found.help or '').partition(chr(12))[0].strip()}\n"
    rows = [(cell(" ".join(each.opts or [each.name])), getattr(each, "help", "") or "") for each in found.params]
    yield from table(rows)
    for each in getattr(found, "commands", {}).values():
        yield from command(each, f"{name} {each.name}")


def option_rows(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yields the lines of a table of a server's options."""
    rows = []
    for each in parser._actions:
        if each.help is not argparse.SUPPRESS:
            says = (each.help or "") % {**vars(each), "prog": parser.prog}
            rows.append((cell(" ".join(each.option_strings) or each.dest), says))
    yield from table(rows)


def cell(name: str) -> str:
    """Returns a name as code."""
    return f"`{name}`"


def table(rows: list[tuple[str, str]]) -> Iterator[str]:
    """Yields the lines of a table of names and meanings; nothing without rows."""
    if rows:
        yield "| option | meaning |\n| --- | --- |"
        yield from (f"| {name} | {escaped(text)} |" for name, text in rows)
        yield ""


def escaped(text: str) -> str:
    """Returns text with escapes for a table's cell."""
    return re.sub(r"([|<*_])", r"\\\1", " ".join(text.split()))


class Page(HTMLParser):
    """The anchors and the link targets of a built page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors, self.links = {""}, set[str]()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Notes the anchor or link of one tag."""
        for name, value in attrs:
            if name == "id" or (tag == "a" and name == "name"):
                self.anchors.add(value or "")
            elif name in ("href", "src") and value and not urlsplit(value).scheme and not value.startswith("//"):
                self.links.add(value)


def dead_links(site: Path) -> list[str]:
    """Returns the links of a built site to missing files or missing anchors."""
    pages = {path.resolve(): Page(path) for path in site.rglob("*.html") if path.name != "404.html"}
    dead = []
    for path, page in pages.items():
        for link in sorted(page.links):
            target, _, anchor = link.partition("#")
            file = (path.parent / unquote(target.partition("?")[0])).resolve() if target else path
            known = pages[file].anchors if file in pages else {"", anchor}
            if not file.is_file() or unquote(anchor) not in known:
                dead.append(f"{path.relative_to(site.resolve())}: {link}")
    return dead


def build(source: Path, site: Path) -> list[str]:
    """Builds a site from staged sources and returns its dead links.

    Raises:
        SystemExit: mkdocs failed or warned.
    """
    stage(source)
    settings = source.parent / "mkdocs.yml"
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").replace("ROOT", str(ROOT))
    settings.write_text(f"docs_dir: {source}\nsite_dir: {site}\n{text}", encoding="utf-8")
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}  # turns off the theme's advertising
    command = [sys.executable, "-m", "mkdocs", "build", "-q", "--strict", "-f", str(settings)]
    done = subprocess.run(command, env=environment, check=False)
    if done.returncode:
        sys.exit(done.returncode)
    return dead_links(site)


# Opens each page in a frame as wide as a phone, and requests /answer with the list of pages that are wider.
FRAMES: Final = """<!doctype html><iframe width={width} height=800></iframe><script>
const pages = {pages}, wide = [], frame = document.querySelector("iframe");
frame.onload = () => {{
  const root = frame.contentDocument.documentElement;
  if (root.scrollWidth > frame.clientWidth) wide.push(pages[0]);
  pages.shift();
  if (pages.length) frame.src = pages[0];
  else fetch("/answer?" + JSON.stringify(wide));
}};
frame.src = pages[0];
</script>"""


def wide_pages(site: Path, browser: str) -> list[str]:
    """Returns the pages of a built site that are wider than a window of 400 pixels.

    Raises:
        SystemExit: the browser did not answer.
    """
    pages = sorted(str(path.relative_to(site)) for path in site.rglob("*.html") if path.name != "404.html")
    frames = FRAMES.format(width=WIDTH, pages=json.dumps(pages))
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile, served(site, frames) as (address, answers):
        options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}"]
        command = [browser, *options, "--remote-debugging-port=0", f"{address}/frames.html"]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as running:
            try:
                found: list[str] = answers.get(timeout=BROWSER_S_MAX)
            except queue.Empty:
                sys.exit(f"{browser} did not check every page")
            finally:
                running.kill()
    return found


@contextlib.contextmanager
def served(folder: Path, frames: str) -> Iterator[tuple[str, queue.Queue[list[str]]]]:
    """Serves a folder on a free local port; yields the address, and the queue that gets the browser's answer."""
    answers: queue.Queue[list[str]] = queue.Queue()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            path, _, query = self.path.partition("?")
            if path == "/answer":
                answers.put(json.loads(unquote(query)))
            if path not in ("/answer", "/frames.html"):
                super().do_GET()
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(frames.encode())

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", answers
        finally:
            server.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sources", action="store_true", help="only write the files that mkdocs reads")
    source, site = ROOT / "build" / "site-source", ROOT / "build" / "site"
    if parser.parse_args().sources:
        stage(source)
        return
    dead = build(source, site)
    print(*dead, sep="\n", file=sys.stderr)
    if dead:
        sys.exit(f"{len(dead)} links are broken")
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        print(f"not run, because there is no Chromium: whether a page is wider than {WIDTH} pixels")
    elif wide := wide_pages(site, browser):
        sys.exit(f"wider than {WIDTH} pixels: {wide}")
    count = len(list(site.rglob("*.html")))
    print(f"{count} pages; open {site / 'index.html'}, or for the search: {sys.executable} -m http.server -d {site}")


if __name__ == "__main__":
    main()
