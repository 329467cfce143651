"""HTML by construction: text is escaped unless it was made here."""

import html
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
        >>> element("p", "1 < 2 ", element("b", "yes"), class_="note")
        '<p class="note">1 &lt; 2 <b>yes</b></p>'
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
    """Escaped; half of a surrogate pair, which a policy may write, becomes a visible mark."""
    return html.escape(words.encode("utf-8", "replace").decode(), quote=True)


def table(head: tuple[str, ...], rows: "list[tuple[Child, ...]]", **attributes: Child) -> Html:
    """A table with a head.

    Example:
        >>> table(("key",), [("a<b",)])
        '<table><thead><tr><th>key</th></tr></thead><tbody><tr><td>a&lt;b</td></tr></tbody></table>'
    """
    top = element("tr", *(element("th", words) for words in head))
    body = [element("tr", *(element("td", cell) for cell in row)) for row in rows]
    return element("table", element("thead", top), element("tbody", *body), **attributes)


def missing(words: str) -> Html:
    """A sentence that says what is not there."""
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
