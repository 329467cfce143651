"""Templates are rendered elsewhere, as transformers would, and within limits, row by row."""

import os
import signal
import threading
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import jinja2
import pytest

from luyen.base.errors import UserError
from luyen.config.model_folder import chat_template
from luyen.config.model_folder.chat_template import (
    TemplateError,
    render,
    template_fault,
    template_remarks,
)
from luyen.config.model_folder.chat_template_worker import make_environment
from luyen.data.tokenizer import load_tokenizer
from tests.character_tokenizer import CHATML, build_character_tokenizer
from tests.tiny_models import their_template
from tests.unit.data.families import TOOLS
from tests.unit.data.templates import ALWAYS_PROMPTS, HEADERS, PLAIN, user

HOME = Path(__file__).parents[2] / "data" / "templates"
CALL = {"function": {"name": "add", "arguments": {"b": 2, "a": "ä<&>\u2028"}}, "id": "call00001"}
TALKS: tuple[list[dict[str, Any]], ...] = (
    [user("1+2=")],
    [{"role": "system", "content": "Be brief."}, user("é <b> \U0001f642 {{ 1 }}")],
    [user("a"), {"role": "assistant", "content": "b\n"}, user("  c ")],
    [
        user("a"),
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "3", "name": "add", "tool_call_id": "call00001"},
    ],
)
SOURCES = {
    **{path.stem: path.read_text() for path in sorted(HOME.glob("*.jinja"))},
    "chatml": CHATML,
    "headers": HEADERS,
    "odd": "{% generation %}{{ messages | tojson(indent=2) }}{% endgeneration %}"
    "  {% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}\n"
    "    {{ m['role'] }}{{ strftime_now('%Y') }}{{ bos_token }}\n  {% endfor %}",
}


def refusal(make: Any) -> str | None:
    """Why there is no text; None where there is one."""
    try:
        make()
    except (TemplateError, TypeError, jinja2.TemplateError) as error:
        return str(error)
    return None


@pytest.mark.parametrize("name", SOURCES)
def test_text_is_that_of_transformers(name: str):
    theirs = their_template(SOURCES[name])
    for talk, tools, prompt in product(TALKS, (None, TOOLS), (False, True)):
        given = {
            "messages": talk,
            "tools": tools,
            "documents": None,
            "bos_token": "<s>",
            "add_generation_prompt": prompt,
        }
        why = refusal(lambda given=given: theirs.render(**given))
        if why is None:
            assert render(SOURCES[name], given) == theirs.render(**given)
        else:
            assert why in str(refusal(lambda given=given: render(SOURCES[name], given)))


def test_a_template_sees_what_transformers_gives_it_and_nothing_else():
    theirs, ours = their_template("").environment, make_environment()
    assert ours.globals.keys() == theirs.globals.keys()
    assert ours.filters.keys() == theirs.filters.keys()
    assert ours.tests.keys() == theirs.tests.keys()
    assert len(ours.extensions) == len(theirs.extensions)
    assert (ours.trim_blocks, ours.lstrip_blocks) == (theirs.trim_blocks, theirs.lstrip_blocks)


@pytest.fixture
def short_patience(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    chat_template._shared.close()
    monkeypatch.setattr(chat_template, "CPU_S", 1)
    yield
    chat_template._shared.close()


@pytest.mark.usefixtures("short_patience")
def test_a_row_on_which_the_template_never_ends_is_refused_and_the_next_one_is_rendered(
    tmp_path: Path,
):
    loops = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    source = "{% if 'bad' in messages[0].content %}" + loops + "{% endif %}" + CHATML
    build_character_tokenizer(tmp_path, chat_template=source)
    found = load_tokenizer(str(tmp_path))
    with pytest.raises(UserError, match="of user: it does not come to an end within 1 s"):
        found.apply_template([user("bad")])
    assert "good" in found.apply_template([user("good")])


def test_a_process_that_was_killed_is_replaced():
    assert render("{{ x }}", {"x": 1}) == "1"
    started = chat_template._shared._started
    assert started is not None
    os.kill(started.pid, signal.SIGKILL)
    with pytest.raises(TemplateError, match="ended with code -9"):
        render("{{ x }}", {"x": 2})
    assert render("{{ x }}", {"x": 3}) == "3"


def test_threads_get_their_own_replies():
    found: dict[int, str] = {}

    def ask(number: int) -> None:
        for _ in range(20):
            found[number] = render("{{ x }}", {"x": number})

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {i: str(i) for i in range(8)}


def test_a_fork_renders_in_a_process_of_its_own():
    assert render("{{ x }}", {"x": 1}) == "1"
    child = os.fork()
    if child == 0:
        good = render("{{ x }}", {"x": 2}) == "2"
        chat_template._shared.close()
        os._exit(0 if good else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert render("{{ x }}", {"x": 3}) == "3"


def test_secrets_of_the_environment_do_not_reach_the_process(monkeypatch: pytest.MonkeyPatch):
    chat_template._shared.close()
    monkeypatch.setenv("MY_TOKEN", "secret")
    render("x", {})
    started = chat_template._shared._started
    assert started is not None
    assert b"secret" not in Path(f"/proc/{started.pid}/environ").read_bytes()


def test_half_a_surrogate_pair_and_values_that_are_no_data():
    for source, value in (("{{ x }}", "\ud800"), ("{{ '\\ud800' }}{{ x }}", "a")):
        with pytest.raises(TemplateError, match="half of a surrogate pair"):
            render(source, {"x": value})
    with pytest.raises(TemplateError, match="no plain data"):
        render("{{ x }}", {"x": object()})


def test_remarks_name_what_a_template_leaves_out():
    assert template_remarks(CHATML, {}) == []
    assert template_remarks(PLAIN, {}) == []
    silent = PLAIN.partition("{%- if add")[0]
    (remark,) = template_remarks(silent, {})
    assert remark.endswith("the policy must write 'assistant: ' itself")
    no_system = PLAIN.replace("in messages", "in messages if m.role != 'system'")
    assert template_remarks(no_system, {}) == ["the chat template leaves system messages out"]
    assert template_remarks(ALWAYS_PROMPTS, {}) == []
    assert template_fault("hello") is not None
    assert template_remarks("hello", {}) == []
