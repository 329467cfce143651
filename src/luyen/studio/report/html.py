"""HTML elements that escape their text, tables, and the style sheet of the page."""

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
    """Escaped text; a lone surrogate, which a policy may write, becomes `?`."""
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


# Style sheet, light and dark by the setting of the browser. The colours are those of the studio's
# page (web/src/style/tokens.css): people with any kind of colour blindness can tell them apart.

LIGHT = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#5f6b76")
DARK = ("#56b4e9", "#f28c3c", "#2fc99a", "#e09cc4", "#f0c04a", "#a7b3bd")


def sheet() -> str:
    """The style sheet.

    Example:
        >>> "prefers-color-scheme:dark" in sheet()
        True
    """
    light = "".join(f"--c{i}:{colour};" for i, colour in enumerate(LIGHT))
    dark = "".join(f"--c{i}:{colour};" for i, colour in enumerate(DARK))
    lines = "".join(
        f".c{i}{{stroke:var(--c{i})}}.d{i},.a{i}{{fill:var(--c{i})}}.k{i}{{background:var(--c{i})}}"
        for i in range(len(LIGHT))
    )
    return (
        f":root{{{light}--bg:#f7f8f9;--fg:#1b2127;--dim:#56616b;--line:#dbe0e4;--box:#ffffff;"
        "--link:#00629b;--good:0,114,178;--bad:213,94,0;--red:#a83a00;--amber:#7d4e00;--green:#00664a}"
        f"@media(prefers-color-scheme:dark){{:root{{{dark}--bg:#11161a;--fg:#e6eaed;--dim:#a0acb5;"
        "--line:#323c44;--box:#181e23;--link:#6cc0f0;--good:86,180,233;--bad:242,140,60;--red:#ff9a66;"
        f"--amber:#f3bb4d;--green:#4fd1a5}}}}{_RULES}{lines}"
    )


_RULES = """
*{box-sizing:border-box}
body{margin:0 auto;max-width:1180px;padding:24px 20px 80px;background:var(--bg);color:var(--fg);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif}
h1{font-size:24px;margin:0 0 4px}h2{font-size:19px;margin:40px 0 12px;padding-top:8px;
border-top:1px solid var(--line)}h3{font-size:15px;margin:18px 0 6px}
p{margin:6px 0}.dim,.missing{color:var(--dim)}.missing{font-style:italic}
nav{margin:10px 0 0}nav a{margin-right:14px}a{color:var(--link)}
.verdict{background:var(--box);border-radius:4px;border-left:4px solid var(--green);
padding:12px 16px;margin:16px 0}
.verdict.warning{border-color:var(--amber)}.verdict.error{border-color:var(--red)}
.verdict p:first-child{font-size:17px;font-weight:600}
.charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(360px,1fr));gap:16px}
figure{margin:0;background:var(--box);border:1px solid var(--line);border-radius:8px;padding:12px}
figcaption{font-size:13px}.key{margin-left:12px;color:var(--dim);white-space:nowrap}
.key i,.mark{display:inline-block;width:10px;height:10px;border-radius:2px;margin-right:5px}
svg{display:block;width:100%;height:auto}svg text{fill:var(--dim);font-size:11px}
svg text.odd{fill:var(--red);font-size:14px}svg .grid{stroke:var(--line);stroke-width:1}
polyline{fill:none;stroke-width:1.8}polyline.pale{stroke-width:1;opacity:.35}polygon{opacity:.8}
.tip{fill:transparent}.tip:hover{fill:var(--fg);fill-opacity:.07}
.wide{overflow-x:auto}table{border-collapse:collapse;font-size:13px;width:100%}
th{text-align:left;color:var(--dim);font-weight:600}
th,td{padding:3px 10px 3px 0;border-bottom:1px solid var(--line);vertical-align:top;
overflow-wrap:anywhere}
code,.tokens,pre{font-family:ui-monospace,"SF Mono",Menlo,Consolas,monospace;font-size:12.5px}
pre{margin:4px 0;white-space:pre-wrap;overflow-wrap:anywhere}
details{margin:8px 0}summary{cursor:pointer;color:var(--dim)}
.sample{background:var(--box);border:1px solid var(--line);border-radius:8px;
padding:10px 14px;margin:12px 0}
.tokens{white-space:pre-wrap;overflow-wrap:anywhere;line-height:1.75;margin:8px 0}
.tokens span{border-radius:2px}.s0{color:var(--dim)}.s2{color:var(--c0)}.s3{color:var(--c3)}
.s1{border-bottom:1px solid var(--line)}.cut{color:var(--dim);font-style:italic}
.finding{border-left:4px solid var(--line);padding:2px 12px;margin:12px 0}
.finding.error{border-color:var(--red)}.finding.warning{border-color:var(--amber)}
.error b.kind{color:var(--red)}.warning b.kind{color:var(--amber)}
ul.tree{margin:2px 0;padding-left:18px;font-size:13px}
""".replace("\n", "")
