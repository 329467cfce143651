"""Answers that were written to make a rule slow or break: 200 KB each where length is the point."""

_LONG = 200_000


def _times(part: str, size: int = _LONG) -> str:
    return part * (size // len(part))


HOSTILE: dict[str, str] = {
    "nothing": "",
    "a NUL": "\x00",
    "NULs": _times("\x00"),
    "half of a surrogate pair": "\ud800",
    "halves of pairs": _times("#### \udfff<answer>\ud800", 10**4),
    "a million letters": _times("a"),
    "blanks": _times(" "),
    "lines": _times("\n"),
    "stars": _times("*"),
    "points": _times(".") + "a",
    "answer is and blanks": "the answer is" + _times(" ") + "?",
    "answer is and stars": "answer:" + _times("*") + "?",
    "a box and blanks": r"\boxed{" + _times(" ") + "?",
    "open boxes": _times(r"\boxed{"),
    "open tags": _times("<answer>"),
    "open fences": _times("```json\n"),
    "a fence and lines": "```json\n" + _times("\n ") + "```x",
    "brackets": "[" * 10**5,
    "braces": '{"a":' * 10**5,
    "brackets that close": "[" * 900 + "]" * 900,
    "a number of 100,000 digits": "#### " + "9" * 10**5,
    "numbers": _times("1 "),
    "groups of thousands": "1" + _times(",111") + "1",
    "an exponent": "#### 1e999999999999999999",
    "digits of other scripts": "#### \u0661\u0662\u00b2\u2460",
    "a tower of powers": r"\boxed{9^{9^{9^{9}}}}",
    "fractions in fractions": r"$" + r"\frac{1}{" * 3_000 + "1" + "}" * 3_000 + "$",
    "roots of roots": r"\boxed{" + r"\sqrt{" * 500 + "2" + "}" * 500 + "}",
    "a factorial": r"\boxed{(10^{9})!}",
    "addresses": _times("http://"),
    "halves of tokens": _times("-eyJ"),
    "a sum that never simplifies": r"\boxed{"
    + "+".join(f"x_{i}^{{{i}}}" for i in range(400))
    + "}",
}
"""What it is -> the answer."""
