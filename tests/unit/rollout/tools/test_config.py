"""Tool files: every form is loaded, everything wrong is told with file and entry."""

import asyncio
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from luyen.base.errors import UserError
from luyen.base.records import ToolCall, make_prompt
from luyen.config.tool_file import BUILTIN_TOOLS, LIMITS, tool_file_problems
from luyen.rollout.parsers.protocol import WrittenCall
from luyen.rollout.tools.builtin_tools import builtin_tools
from luyen.rollout.tools.protocol import Tool, ToolLimits
from luyen.rollout.tools.registry import ToolRegistry
from luyen.rollout.tools.tool_file import load_tools
from tests.optional import needs

HERE = Path(__file__).parent
JUDGE = """
  - class_name: {here}/verl_tools.py:Judge
    config: {{type: native, rate: 7}}
    tool_schema:
      type: function
      function:
        name: judge
        description: Judge an answer.
        parameters:
          type: object
          properties: {{answer: {{type: string}}}}
          required: [answer]
"""
PYTHON_FILE = '''
from luyen.rollout.tools import tool, tool_class

@tool(timeout_s=2.0)
def shout(text: str) -> str:
    """Louder."""
    return text.upper()

@tool_class
class NoteBook:
    """Notes."""

    def __init__(self, most: int = 9) -> None:
        self.notes, self.most = [], most

    def create(self, prompt, start: str = "none") -> None:
        self.notes.append(f"{prompt.messages[0]['content']}/{start}")

    def call(self, note: str) -> list[str]:
        """Write a note."""
        self.notes.append(note)
        return [*self.notes, self.most]

    async def score(self) -> float:
        return float(len(self.notes))

plain = 3
'''


def tool_file(folder: Path, text: str) -> str:
    path = folder / "tools.yaml"
    path.write_text("tools:" + text.format(here=HERE))
    return str(path)


def played(
    tools: tuple[Tool, ...], *calls: tuple[str, dict[str, Any]], **extra: Any
) -> tuple[list[ToolCall], dict[str, float]]:
    async def run() -> tuple[list[ToolCall], dict[str, float]]:
        prompt = make_prompt([{"role": "user", "content": "Hi"}], extra_info=extra)
        opened = await ToolRegistry(tools).open(prompt, 5)
        made = [await opened.call(WrittenCall(name=n, arguments=a), 0) for n, a in calls]
        scores = await opened.score()
        await opened.release()
        assert opened.problems == []
        return made, scores

    return asyncio.run(run())


def test_the_catalog_is_what_is_registered():
    assert tuple(builtin_tools) == BUILTIN_TOOLS
    assert set(LIMITS) == set(ToolLimits.__slots__)


def test_a_class_in_verls_style_gets_what_the_row_gives_it(tmp_path: Path):
    row = {
        "judge": {"create_kwargs": {"ground_truth": "4"}, "execute_kwargs": {"strict": True}},
        "plain": {},
    }
    tools = load_tools(
        tool_config_path=tool_file(
            tmp_path, JUDGE + "  - class_name: {here}/verl_tools.py:Plain\n"
        ),
        timeout_s=7.0,
    )
    assert [tool.limits.timeout_s for tool in tools] == [7.0, 7.0]
    calls = [("judge", {"answer": "5"}), ("judge", {"answer": "4"}), ("plain", {})]
    (wrong, right, plain), scores = played(tools, *calls, tools_kwargs=row)
    assert wrong.reward == -0.5
    assert right.reward == 0.5
    assert right.result == "1.0 {'create_kwargs': {'ground_truth': '4'}} {'strict': True} 7"
    assert (plain.result, plain.reward) == ("from an object", None)
    assert scores == {"judge": 1.0}
    (again,), _ = played(tools, ("judge", {"answer": "5"}), tools_kwargs=row)
    assert again.reward == -0.5, "every rollout starts afresh"


def test_functions_classes_and_built_ins_of_our_own(tmp_path: Path):
    (tmp_path / "mine.py").write_text(PYTHON_FILE)
    (tmp_path / "facts.jsonl").write_text('{"title": "Rome", "text": "Capital of Italy."}\n')
    text = """
  - function: mine.py:shout
    limits: {{retries: 2}}
  - class_name: mine.py:NoteBook
    config: {{type: native, most: 3}}
  - builtin: calculator
    limits: {{timeout_s: 1}}
  - builtin: search
    config: {{path: facts.jsonl, name: facts, top_k: 1}}
"""
    tools = load_tools(tool_config_path=tool_file(tmp_path, text), timeout_s=7.0)
    assert [tool.name for tool in tools] == ["shout", "note_book", "calculator", "facts"]
    assert [tool.limits.timeout_s for tool in tools] == [2.0, 7.0, 1, 7.0]
    assert tools[0].limits.retries == 2
    row = {"note_book": {"create_kwargs": {"start": "row"}}}
    (loud, notes, product, fact), scores = played(
        tools,
        ("shout", {"text": "hi"}),
        ("note_book", {"note": "a"}),
        ("calculator", {"expression": "6*7"}),
        ("facts", {"query": "capital of italy"}),
        tools_kwargs=row,
    )
    assert (loud.result, product.result) == ("HI", "42")
    assert notes.result == '["Hi/row", "a", 3]'
    assert fact.result == "[1] Rome: Capital of Italy."
    assert scores == {"note_book": 2.0}


def test_a_python_file_gives_all_its_tools(tmp_path: Path):
    (tmp_path / "mine.py").write_text(PYTHON_FILE)
    tools = load_tools(function_tool_path=str(tmp_path / "mine.py"), timeout_s=7.0)
    assert [(tool.name, tool.limits.timeout_s) for tool in tools] == [
        ("shout", 2.0),
        ("note_book", 7.0),
    ]
    assert load_tools() == ()


@needs("mcp")
def test_mcp_servers_in_our_form_and_in_verls(tmp_path: Path):
    import json

    server = {"command": sys.executable, "args": [str(HERE / "mcp_server.py"), "stdio"]}
    listed = tmp_path / "servers.json"
    listed.write_text(json.dumps({"mcpServers": {"numbers": server}}))
    text = f"""
  - mcp:
      command: [{sys.executable}, {HERE / "mcp_server.py"}, stdio]
      select: [add]
      prefix: my_
    limits: {{{{concurrency: 2}}}}
  - class_name: verl.tools.mcp_search_tool.MCPSearchTool
    config: {{{{type: mcp, rate_limit: 4}}}}
    mcp: {{{{mcp_servers_config_path: servers.json, tool_selected_list: [add, pid]}}}}
"""
    tools = load_tools(tool_config_path=tool_file(tmp_path, text))
    try:
        assert [tool.name for tool in tools] == ["my_add", "add", "pid"]
        assert tools[0].limits.concurrency == 2
        (made,), _ = played(tools, ("my_add", {"a": 1, "b": 2}))
        assert made.result == "3"
    finally:
        assert asyncio.run(ToolRegistry(tools).close()) == []


WRONG: list[tuple[str, str]] = [
    ("\n", r"tools = None: the file lists no tools"),
    (" [3]\n", r"tools\[1\] = 3: an entry is a mapping"),
    ("\n  - {{}}\n", r"tools\[1\] = \[\]: an entry names its tool by exactly one of"),
    ("\n  - {{builtin: a, function: b}}\n", "exactly one of"),
    (
        "\n  - builtin: calculator\n  - {{builtin: search, confg: {{}}}}\n",
        r"tools\[2\]\.confg.*did you mean `config`",
    ),
    ("\n  - builtin: calculater\n", "did you mean `calculator`"),
    ("\n  - builtin: calculator\n  - builtin: calculator\n", r"tools\[2\].*tools\[1\] has this"),
    ("\n  - builtin: calculator\n    limits: {{timout_s: 3}}\n", "did you mean `timeout_s`"),
    ("\n  - builtin: calculator\n    limits: {{timeout_s: soon}}\n", "expected a number"),
    ("\n  - builtin: calculator\n    limits: 3\n", "expected a mapping"),
    ("\n  - function: mine.py:shuot\n", "did you mean `shout`"),
    ("\n  - function: gone.py:shout\n", "cannot be read"),
    ("\n  - function: shout\n", "does not say where to look"),
    ("\n  - class_name: Judge\n", "does not say where to look"),
    ("\n  - class_name: a.b\n    tool_schema: {{type: function}}\n", "a schema holds `function`"),
    ("\n  - mcp: {{}}\n", "exactly one way"),
    ("\n  - mcp: {{url: 'http://x', commnd: y}}\n", "did you mean `command`"),
]
WRONG_WHEN_LOADED: list[tuple[str, str]] = [
    ("\n  - function: mine.py:plain\n", r"tools\[1\].*it is no tool.*decorate"),
    ("\n  - class_name: {here}/verl_tools.py:Lacking\n", "lacks `create`"),
    ("\n  - class_name: no.such.module.Tool\n", "importing it failed: ModuleNotFoundError"),
    ("\n  - class_name: pathlib.Pth\n", "did you mean `Path`"),
    ("\n  - class_name: {here}/verl_tools.py:Judge\n", "making the tool failed: AttributeError"),
    ("\n  - class_name: verl.tools.gsm8k_tool.Gsm8kTool\n", "verl is not installed"),
    ("\n  - class_name: mine.py:NoteBook\n    config: {{mots: 3}}\n", "change `config`"),
    ("\n  - builtin: search\n", "either a file or documents"),
    ("\n  - builtin: search\n    config: {{path: gone.jsonl}}\n", "cannot be read"),
    ("\n  - builtin: search\n    config: {{documents: {{}}, top_k: 0}}\n", "number from 1"),
    ("\n  - builtin: calculator\n    config: {{1: 2}}\n", "the tool has no such setting"),
    ("\n  - builtin: calculator\n    1: 2\n", "no such key here"),
    ("\n  - mcp: [a]\n", "expected a mapping"),
    ("\n  - mcp: {{command: 5}}\n", "expected a program"),
    ("\n  - mcp: {{url: 'http://u', start_s: -1}}\n", "expected a number above 0"),
    ("\n  - mcp: {{mcp_servers_config_path: gone.json}}\n", "it lists no servers"),
    ("\n  - builtin: calculator\n    config: {{digits: 3}}\n", "the tool has no such setting"),
    ("\n  - builtin: calculator\n    limits: {{retries: 0.5}}\n", "expected a whole number"),
    ("\n  - function: mine.py:shout\n  - function: mine.py:shout\n", "two tools have this name"),
    (
        "\n  - {{class_name: my.Tool, config: {{type: mcp}}, mcp: {{url: 'http://x'}}}}\n",
        "a class of one's own",
    ),
]


@pytest.mark.parametrize(("text", "said"), [*WRONG, *WRONG_WHEN_LOADED])
def test_what_is_wrong_is_told_with_file_and_entry(tmp_path: Path, text: str, said: str):
    (tmp_path / "mine.py").write_text(PYTHON_FILE)
    path = tool_file(tmp_path, text)
    with pytest.raises(UserError, match=f"(?s){said}") as caught:
        load_tools(tool_config_path=path)
    assert caught.value.field.startswith(f"{path}: tools")


@pytest.mark.parametrize(("text", "said"), WRONG)
def test_check_finds_the_same_without_importing(tmp_path: Path, text: str, said: str):
    (tmp_path / "mine.py").write_text("raise SystemExit\n" + PYTHON_FILE)
    assert tool_file_problems(tool_file(tmp_path, text)) != ()


def test_check_accepts_what_is_right_and_reports_what_is_no_yaml(tmp_path: Path):
    (tmp_path / "mine.py").write_text("raise SystemExit\n" + PYTHON_FILE)
    good = JUDGE + "  - function: mine.py:shout\n  - builtin: python\n  - mcp: {{command: [a]}}\n"
    assert tool_file_problems(tool_file(tmp_path, good)) == ()
    broken = tmp_path / "broken.yaml"
    broken.write_text("tools: [")
    assert "not valid YAML" in tool_file_problems(str(broken))[0].why
    broken.write_text("tool: []")
    assert "no key `tool`" in tool_file_problems(str(broken))[0].why
    assert "cannot be read" in tool_file_problems(str(tmp_path / "gone.yaml"))[0].why


@needs("mcp")
def test_tools_load_neither_torch_nor_transformers():
    code = dedent("""
        import sys, luyen.rollout.tools.tool_file, luyen.rollout.tools.registry
        import luyen.rollout.tools.mcp
        print(*{"torch", "transformers"} & set(sys.modules))
    """)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
