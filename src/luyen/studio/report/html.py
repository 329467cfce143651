"""HTML elements that escape their text, tables, and the style sheet that the studio has too."""

import html
import re
from importlib import resources
from typing import TypeAlias, final


@final
class Html(str):
    """Markup that was built by `element`; any other string is text and gets escaped."""

    __slots__ = ()


Child: TypeAlias = "Html | str | float | None"
_EMPTY = ("br", "meta")


def element(name: str, /, *children: Child, **attributes: Child) -> Html:
    """An element; None among children and attributes is left out.

    An attribute may end with `_`, where its name is a word of Python.

    Example:
        >>> element("p", "1 < 2 ", element("b", "yes"), class_="dim")
        '<p class="dim">1 &lt; 2 <b>yes</b></p>'
    """
    words = [
        f' {key.rstrip("_").replace("_", "-")}="{_text(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    ]
    opening = f"<{name}{''.join(words)}>"
    return Html(opening if name in _EMPTY else f"{opening}{joined(*children)}</{name}>")


def joined(*children: Child) -> Html:
    """Children one after the other.

    Example:
        >>> joined("a & b", None, element("br"))
        'a &amp; b<br>'
    """
    parts = (c if isinstance(c, Html) else _text(str(c)) for c in children if c is not None)
    return Html("".join(parts))


def _text(words: str) -> str:
    """Escaped text; a lone surrogate, which a policy may write, becomes `?`."""
    return html.escape(words.encode("utf-8", "replace").decode(), quote=True)


def table(head: tuple[str, ...], rows: "list[tuple[Child, ...]]", **attributes: Child) -> Html:
    """A table with a head, which scrolls by itself where it is wide.

    Example:
        >>> str(table(("key",), [("a<b",)]))[-48:]
        '<tr><td>a&lt;b</td></tr></tbody></table></div>'
    """
    top = element("tr", *(element("th", words) for words in head))
    body = [element("tr", *(element("td", cell) for cell in row)) for row in rows]
    inner = element("table", element("thead", top), element("tbody", *body), **attributes)
    return element("div", inner, class_="card flush wide", tabindex="0")


def missing(words: str) -> Html:
    """A paragraph about missing data."""
    return element("p", words, class_="missing")


def number(value: float | None) -> str:
    """A number for people.

    Example:
        >>> number(0.123456), number(1234567.0), number(0.0000123), number(None)
        ('0.1235', '1,234,567', '1.23e-05', 'none')
    """
    if value is None:
        return "none"
    if value != value or abs(value) == float("inf"):
        return str(value)
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}" if abs(value) >= 1e-3 else f"{value:.2e}"


# Style sheet: that of the studio's page, whose components these are, and rules of drawings.

COLOURS = 6
"""Colours of lines and stripes, `--c0` to `--c5` of the style sheet."""
_DARK = re.compile(r':root\[data-theme="?dark"?\]\{([^{}]*)\}')


def sheet() -> str:
    """The style sheet: the studio's, with its dark colours by the setting of the browser.

    Example:
        >>> "prefers-color-scheme:dark" in sheet()
        True
    """
    shared = (resources.files("luyen") / "web" / "page" / "studio.css").read_text()
    dark = _DARK.search(shared)
    assert dark is not None, "the style sheet of the studio has no dark colours"
    lines = "".join(
        f".l{i}{{stroke:var(--c{i})}}.d{i},.a{i}{{fill:var(--c{i})}}" for i in range(COLOURS)
    )
    return f"{shared}@media(prefers-color-scheme:dark){{:root{{{dark[1]}}}}}{_DRAWINGS}{lines}"


_DRAWINGS = """
.bar{flex-wrap:wrap}.bar nav{display:flex;flex-wrap:wrap;flex-basis:auto;flex-direction:row}
main>section{scroll-margin-top:calc(var(--bar) + 12px)}.missing{color:var(--dim);font-style:italic}
figcaption{display:flex;flex-wrap:wrap;gap:2px 12px;padding-bottom:8px;font-size:var(--text-s)}
figcaption b{flex-basis:100%;font-size:var(--text-m)}.key{color:var(--dim);white-space:nowrap}
@media(max-width:760px){.bar{position:static}}
.key i{display:inline-block;width:10px;height:10px;border-radius:2px;margin-right:5px}
.chart-card svg{display:block;width:100%;height:auto}
.chart-card text{fill:var(--dim);font-size:14px}
.chart-card text.odd{fill:var(--bad);font-size:16px}line.rule{stroke:var(--line);stroke-width:1}
polyline{fill:none;stroke-width:1.8}polyline.pale{stroke-width:1;opacity:.35}polygon{opacity:.8}
.hover{fill:transparent}.hover:hover{fill:var(--fg);fill-opacity:.07}
td{overflow-wrap:anywhere}.s0{color:var(--dim)}.s2{color:var(--c2)}
.s3{color:var(--dim);font-style:italic}.cut{color:var(--dim);font-style:italic}
.verdict{flex-direction:column;gap:4px}.verdict p:first-child{font-weight:620}
.verdict p+p{font-size:var(--text-m)}.tree .dim{margin-left:8px}
"""
