"""Which requests the studio answers: a token, loopback names only, no other web page's requests.

The studio starts processes, so a page of another site must not reach it. Such a page can make a
browser send requests to 127.0.0.1 (with simple content types and without reading the answer), and
can point a name of its own at 127.0.0.1. Against the first stand the token, the cookie's
`SameSite=Strict`, `Origin` and a header of our own; against the second the check of `Host`.
"""

import secrets
from collections.abc import Mapping
from typing import final
from urllib.parse import parse_qs, urlencode, urlsplit

from luyen.base.errors import UserError
from luyen.serve.access import Keyring, is_loopback
from luyen.studio.screens.folder import Refusal

HEADER = "x-luyen-studio"
"""A request that changes something carries it: another site cannot send it without asking."""


def demand_loopback(host: str) -> None:
    """A UserError for an address that other machines can reach."""
    if not is_loopback(host):
        why = "the studio starts processes and is for this machine alone"
        fix = "use 127.0.0.1, and a tunnel from elsewhere: ssh -L 8787:127.0.0.1:8787 HOST"
        raise UserError("--host", host, why, fix)


@final
class StudioAccess:
    """Checks the headers of a request.

    Example:
        >>> access = StudioAccess(port=8000, token="0123456789abcdef")
        >>> access.has_token({"authorization": "Bearer 0123456789abcdef"}), access.has_token({})
        (True, False)
    """

    def __init__(self, *, port: int, token: str | None = None) -> None:
        self.port = port
        self.token = token or secrets.token_urlsafe(24)
        self._ring = Keyring.of([self.token])
        self.cookie = f"luyen_studio_{port}"

    def check_host(self, headers: Mapping[str, str]) -> None:
        """A refusal unless the request names this machine and comes from the studio's own page."""
        host, port = _split(headers.get("host", ""))
        if not is_loopback(host) or port not in (None, self.port):
            fix = f"open http://127.0.0.1:{self.port}/"
            raise Refusal(421, "Host: it is no loopback name of this server", field="Host", fix=fix)
        origin = headers.get("origin")
        if origin is not None:
            parts = urlsplit(origin)
            its_host, its_port = _split(parts.netloc)
            is_own = parts.scheme == "http" and is_loopback(its_host) and its_port == self.port
            if not is_own:
                message = "Origin: requests of other web pages are refused"
                raise Refusal(403, message, field="Origin", fix="use the studio's own page")
        if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            message = "Sec-Fetch-Site: requests of other web pages are refused"
            raise Refusal(403, message, field="Sec-Fetch-Site", fix="use the studio's own page")

    def check_change(self, headers: Mapping[str, str]) -> None:
        """A refusal unless a request may change something."""
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            message = "Content-Type: it is not application/json"
            raise Refusal(415, message, field="Content-Type", fix="send that header")
        if headers.get(HEADER) != "1":
            message = "X-Luyen-Studio: the header is missing"
            raise Refusal(403, message, field="X-Luyen-Studio", fix="send `X-Luyen-Studio: 1`")

    def check_token(self, headers: Mapping[str, str]) -> None:
        """A refusal without the token."""
        if not self.has_token(headers):
            fix = "open the address that the terminal of `luyen studio` shows"
            raise Refusal(401, "the token is missing or wrong", field="token", fix=fix)

    def has_token(self, headers: Mapping[str, str]) -> bool:
        """Whether the request carries the token, in the cookie or as a bearer."""
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and self.has(bearer.strip()):
            return True
        # Browsers send the cookies of every server of this host, whatever its port, and some of
        # those are not written as the standard library demands: the rest is not looked at.
        pairs = (pair.partition("=") for pair in headers.get("cookie", "").split(";"))
        return any(
            name.strip() == self.cookie and self.has(value.strip()) for name, _, value in pairs
        )

    def has(self, token: str) -> bool:
        """Whether it is the token; takes as long for a wrong one as for a right one."""
        return self._ring.has(token)

    def given_in(self, query: str) -> str | None:
        """The token of a query string, if it is the right one."""
        found = parse_qs(query).get("token", [""])[0]
        return found if found and self.has(found) else None

    def set_cookie(self) -> str:
        """The header that lets the browser keep the token."""
        return f"{self.cookie}={self.token}; HttpOnly; SameSite=Strict; Path=/"

    def url(self, base: str) -> str:
        """The address for the browser."""
        return f"{base}/?{urlencode({'token': self.token})}"


def _split(netloc: str) -> tuple[str, int | None]:
    """Host and port; an unreadable port makes the host unreadable too."""
    try:
        parts = urlsplit(f"//{netloc}")
        if parts.username is not None or parts.password is not None:
            return "", None
        host, port = parts.hostname or "", parts.port
    except ValueError:
        return "", None
    return host, port


def small_page(title: str, body: str) -> str:
    """A page without scripts."""
    style = "body{font:16px/1.5 system-ui;max-width:44rem;margin:4rem auto;padding:0 1rem}"
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{style}</style></head>'
        f"<body><h1>{title}</h1>{body}</body></html>"
    )


def no_token_page() -> str:
    """Says where the token is."""
    return small_page(
        "Luyen studio",
        "<p>This page needs the token of the studio. The terminal in which <code>luyen studio"
        "</code> was started shows the address with it.</p>"
        "<p>Trang này cần mã truy cập. Địa chỉ kèm mã nằm trong cửa sổ dòng lệnh đã chạy "
        "<code>luyen studio</code>.</p>",
    )


def no_build_page(base: str) -> str:
    """Says how the page is built."""
    return small_page(
        "Luyen studio",
        "<p>The page was not built. In a checkout, run <code>make web</code>; an installed "
        f'package ships it. The data is at <a href="{base}/docs">{base}</a>.</p>',
    )
