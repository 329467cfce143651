"""What the site has beside the pages of this folder: files that they link to, and the Python API.

A link that leaves this folder leads, in the repository, to a file or a folder. The site has it as a
page below `repository/`: Markdown as it is, other text in a code block, a folder as a list.
"""

import ast
import posixpath
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
DOCS, OUTSIDE = "docs/", "repository/"
REFERENCE = "api_reference.md"
_LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(\))")
_FENCE = re.compile(r"^(```+|~~~+).*?^\1\s*$", re.MULTILINE | re.DOTALL)
_LANGUAGES = {".py": "python", ".sh": "sh", ".yaml": "yaml", ".yml": "yaml", ".toml": "toml"}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Entries of the navigation that name a folder become its pages, README first."""
    config.nav = _expanded(config.nav)
    return config


def _expanded(entry: Any) -> Any:
    if isinstance(entry, list):
        return [_expanded(one) for one in entry]
    if isinstance(entry, dict):
        return {title: _expanded(one) for title, one in entry.items()}
    if not entry.endswith("/"):
        return entry
    pages = sorted(
        (ROOT / DOCS / entry).glob("*.md"), key=lambda path: (path.stem != "README", path)
    )
    return [entry + path.name for path in pages]


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the page of the API, and every file outside of this folder that a page leads to."""
    files.append(File.generated(config, REFERENCE, content=api_reference()))
    inside = [file.src_uri for file in files.documentation_pages() if file.src_uri != REFERENCE]
    texts = {f"{DOCS}{uri}": (ROOT / DOCS / uri).read_text() for uri in inside}
    todo = [*texts, "CONTRIBUTING.md", "CHANGELOG.md"]
    done: set[str] = set()
    while todo:
        path = todo.pop()
        if path in done:
            continue
        done.add(path)
        text = texts.get(path)
        if (ROOT / path).is_dir():
            files.append(File.generated(config, uri_of(path), content=folder_page(path)))
            todo += files_of(path)
            continue
        if text is None:
            text = (ROOT / path).read_text()
            files.append(_outside(path, text, config))
        if path.endswith(".md"):
            todo += [p for p in targets(path, text) if not p.startswith(DOCS)]
    return files


def _outside(path: str, text: str, config: MkDocsConfig) -> File:
    content = text
    if not path.endswith(".md"):
        language = _LANGUAGES.get(Path(path).suffix, "")
        content = f"# {path}\n\n````{language}\n{text}\n````\n"
    listed = path in ("CONTRIBUTING.md", "CHANGELOG.md")
    inclusion = InclusionLevel.UNDEFINED if listed else InclusionLevel.NOT_IN_NAV
    return File.generated(config, uri_of(path), content=content, inclusion=inclusion)


def files_of(folder: str) -> list[str]:
    """Text files of a folder that has no page of its own, by their paths from the root."""
    names = sorted(path.name for path in (ROOT / folder).iterdir() if path.suffix in _LANGUAGES)
    return [f"{folder}/{name}" for name in names]


def folder_page(folder: str) -> str:
    """Its files, each with a link to its page of the site."""
    here = posixpath.dirname(uri_of(folder))
    lines = [f"- [{path}]({posixpath.relpath(uri_of(path), here)})" for path in files_of(folder)]
    return "\n".join([f"# {folder}", "", *lines, ""])


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links lead to where the site has their files."""
    del config, files
    uri = page.file.src_uri
    if uri == REFERENCE:
        return markdown
    path = uri.removeprefix(OUTSIDE) if uri.startswith(OUTSIDE) else f"{DOCS}{uri}"
    if not (ROOT / path).is_file():  # a page made of a file that is no Markdown
        return markdown

    def moved(found: re.Match[str]) -> str:
        target = target_of(path, found[2])
        if target is None:
            return found[0]
        new = posixpath.relpath(uri_of(target), posixpath.dirname(uri) or ".")
        return f"{found[1]}{new}{found[3] or ''}{found[4]}"

    return outside_of_code(markdown, lambda text: _LINK.sub(moved, text))


def outside_of_code(text: str, change: Callable[[str], str]) -> str:
    """The text with its prose changed, and blocks of code as they are."""
    parts, start = list[str](), 0
    for block in _FENCE.finditer(text):
        parts += [change(text[start : block.start()]), block[0]]
        start = block.end()
    return "".join([*parts, change(text[start:])])


def targets(path: str, text: str) -> Iterator[str]:
    """Files of the repository that a page leads to, by their paths from its root."""
    for found in _LINK.finditer(_FENCE.sub("", text)):
        target = target_of(path, found[2])
        if target is not None:
            yield target


def target_of(path: str, link: str) -> str | None:
    """The file of the repository that a link of the page at `path` names; None for all else.

    A folder leads to its first page, and where it has none, to the list of its files.
    """
    if "://" in link or link.startswith(("mailto:", "/")):
        return None
    target = posixpath.normpath(posixpath.join(posixpath.dirname(path), link))
    if (ROOT / target).is_dir():
        pages = sorted((ROOT / target).glob("*.md"), key=lambda page: (page.stem != "README", page))
        target = f"{target}/{pages[0].name}" if pages else target
    is_there = (ROOT / target).is_file() or ((ROOT / target).is_dir() and bool(files_of(target)))
    return target if not target.startswith("..") and is_there else None


def uri_of(path: str) -> str:
    """Where the site has a file of the repository."""
    if path.startswith(DOCS):
        return path.removeprefix(DOCS)
    return f"{OUTSIDE}{path}" if path.endswith(".md") else f"{OUTSIDE}{path}.md"


# The Python API: the names of docs/api.md, in its order, with their docstrings.


def api_reference() -> str:
    """The page: a heading for each group of names, below it what mkdocstrings finds."""
    places = public_places((ROOT / "src/luyen/__init__.py").read_text())
    lines = [
        "# API reference",
        "",
        "The names of [the API page](api.md), from their docstrings.",
        "",
    ]
    for group, names in public_groups((ROOT / "docs/api.md").read_text()):
        lines += [f"## {group[0].upper()}{group[1:]}", ""]
        for name in names:
            lines += [
                f"::: {places[name]}",
                f"    options: {{heading: luyen.{name}, heading_level: 3}}",
                "",
            ]
    return "\n".join(lines)


def public_places(source: str) -> dict[str, str]:
    """Public name -> where it is defined, by the table of the package."""
    [table] = [
        node.value
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_MODULES"
    ]
    modules: dict[str, tuple[str, ...]] = ast.literal_eval(table)
    return {name: f"{module}.{name}" for module, names in modules.items() for name in names}


def public_groups(page: str) -> list[tuple[str, list[str]]]:
    """Groups of names in the last table of the page."""
    table = page.partition("| for | names |")[2].partition("\n\n")[0]
    rows = [line.strip("|").split("|") for line in table.splitlines() if "`" in line]
    return [(row[0].strip(), re.findall(r"`(\w+)`", row[1])) for row in rows]
