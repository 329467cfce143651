"""Every link between pages of the built site leads to a file of it, and to a place of that page.

`make site` runs it: python -m tests.package.site_links FOLDER. It needs no package.
"""

import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag


class Page(HTMLParser):
    """What a page links to, and the places in it that have a name."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.names: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Keep links and names of an element."""
        del tag
        given = {name: value for name, value in attrs if value}
        self.names |= {given[name] for name in ("id", "name") if name in given}
        self.links += [given[name] for name in ("href", "src") if name in given]


def broken(folder: Path) -> Iterator[str]:
    """Links without a target, each with its page."""
    pages = {path.resolve(): Page(path.read_text()) for path in folder.rglob("*.html")}
    for path, page in pages.items():
        for link in page.links:
            address, place = urldefrag(link)
            if ":" in address.partition("/")[0] or address.startswith("//"):
                continue
            start = folder if address.startswith("/") else path.parent
            target = (start / unquote(address).lstrip("/")).resolve() if address else path
            if target.is_dir():
                target /= "index.html"
            if not target.is_file():
                yield f"{path.relative_to(folder.resolve())}: {link}"
            elif place and target in pages and unquote(place) not in pages[target].names:
                yield f"{path.relative_to(folder.resolve())}: {link} (no such place)"


if __name__ == "__main__":
    found = list(broken(Path(sys.argv[1])))
    sys.exit("\n".join(["links that lead nowhere:", *found]) if found else 0)
