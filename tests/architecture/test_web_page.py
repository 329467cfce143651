"""The page of the studio that is shipped is the build of its sources, small, and without a network.

`make web` builds it. No npm is needed here: the build records a digest of its sources and of its
files.
"""

import hashlib
import json
import re
from pathlib import Path

import pytest

from luyen.studio.report.html import sheet
from tests.architecture.tree import ROOT

WEB = ROOT / "web"
PAGE = ROOT / "src/luyen/web/page"
SOURCES = (
    "index.html",
    "package.json",
    "package-lock.json",
    "public",
    "src",
    "tsconfig.json",
    "vite.config.ts",
)
"""What the build depends on; the list of `web/stamp.mjs`."""

LARGEST = 600_000
"""Bytes of the whole page."""


def _digest(root: Path, names: tuple[str, ...] = SOURCES) -> str:
    """The digest that `web/stamp.mjs` writes: of (digest of a file, path), ordered by path."""
    paths = [
        path
        for name in names
        for path in ([root / name] if (root / name).is_file() else (root / name).rglob("*"))
        if path.is_file()
    ]
    whole = hashlib.sha256()
    for path in sorted(paths, key=lambda one: one.relative_to(root).as_posix()):
        one = hashlib.sha256(path.read_bytes()).hexdigest()
        whole.update(f"{one} {path.relative_to(root).as_posix()}\n".encode())
    return whole.hexdigest()


def _problems(root: Path, page: Path) -> list[str]:
    stamp = json.loads((page / "build.json").read_text())
    found: list[str] = []
    if stamp["sources"] != _digest(root):
        found.append("the sources in web/ changed since the build: make web")
    files = {p.relative_to(page).as_posix(): p for p in page.rglob("*") if p.is_file()}
    files.pop("build.json")
    if sorted(files) != sorted(stamp["files"]):
        found.append(f"other files than those of the build: {sorted(files)}")
    for name, digest in stamp["files"].items():
        if name in files and hashlib.sha256(files[name].read_bytes()).hexdigest() != digest:
            found.append(f"{name} is not the file that was built: make web")
    return found


def test_the_shipped_page_is_the_build_of_its_sources():
    assert _problems(WEB, PAGE) == []


def test_a_changed_source_and_a_changed_page_are_noticed(tmp_path: Path):
    web, page = tmp_path / "web", tmp_path / "page"
    (web / "src").mkdir(parents=True)
    page.mkdir()
    (web / "src/a.ts").write_text("1")
    (page / "a.js").write_text("1")
    files = {"a.js": hashlib.sha256(b"1").hexdigest()}
    stamp = {"sources": _digest(web, ("src",)), "files": files}
    (page / "build.json").write_text(json.dumps(stamp))
    for name in SOURCES:
        if not (web / name).exists() and "." in name:
            (web / name).write_text("")
    assert _problems(web, page) == ["the sources in web/ changed since the build: make web"]
    (page / "a.js").write_text("2")
    assert "a.js is not the file that was built: make web" in _problems(web, page)


def test_the_page_is_small():
    assert sum(path.stat().st_size for path in PAGE.rglob("*") if path.is_file()) < LARGEST


def test_the_page_has_no_inline_script_and_names_no_other_host():
    html = (PAGE / "index.html").read_text()
    assert re.findall(r"<script(?![^>]*\bsrc=)", html) == []
    assert re.findall(r"\son\w+=|style=", html) == []
    code = (PAGE / "studio.js").read_text() + (PAGE / "studio.css").read_text() + html
    # Names of XML namespaces and a warning's reading matter are no requests; anything else is new.
    hosts = set(re.findall(r"(?:https?:)?//([\w-]+(?:\.[\w-]+)+)", code))
    assert hosts <= {"www.w3.org"}


@pytest.mark.parametrize("word", ["dangerouslySetInnerHTML", "insertAdjacentHTML", "eval("])
def test_text_of_runs_never_becomes_markup(word: str):
    for path in (WEB / "src").rglob("*.ts*"):
        text = path.read_text()
        assert word not in text, path
        assert re.findall(r"\.(?:inner|outer)HTML", text) == [], path


def test_the_lock_file_names_no_registry():
    lock = json.loads((WEB / "package-lock.json").read_text())
    assert len(lock["packages"]) > 5
    assert [name for name, entry in lock["packages"].items() if "resolved" in entry] == []
    assert all("integrity" in entry for name, entry in lock["packages"].items() if name)


def test_the_report_has_the_style_sheet_of_the_studio_and_its_dark_colours():
    whole = sheet()
    shipped = (PAGE / "studio.css").read_text()
    assert whole.startswith(shipped)
    night = whole.removeprefix(shipped).partition("@media(prefers-color-scheme:dark){:root{")[2]
    assert night
    sources = (WEB / "src/style/tokens.css").read_text()
    dark = sources.split(':root[data-theme="dark"]')[1]
    named = dict(re.findall(r"--([\w-]+): (#\w+);", dark))
    assert len(named) > 15
    for name, colour in named.items():
        found = re.search(rf"--{name}:(#\w+)", night)
        assert found is not None
        assert len(found[1]) in (4, 7)
        short = colour[0] + colour[1::2] if found[1] != colour else colour
        assert found[1] == short, name


def test_every_class_of_the_report_has_a_rule():
    """What the report names and no rule describes would look unlike the studio."""
    folder = ROOT / "src/luyen/studio/report"
    text = "".join(path.read_text() for path in folder.glob("*.py"))
    named = {word for words in re.findall(r'class_="([\w -]+)"', text) for word in words.split()}
    assert len(named) > 20
    css = sheet()
    assert {name for name in named if not re.search(rf"\.{name}\b", css)} == set()
