"""The public surface: `import luyen` has what the page lists, is typed, and loads nothing heavy."""

import ast
import re
import subprocess
import sys

import luyen
from tests.architecture.tree import ROOT

SURFACE = [
    "AdaptiveSampler",
    "Callback",
    "Completion",
    "Credit",
    "CreditInputs",
    "EarlyStopping",
    "Fingerprint",
    "GroupId",
    "ManagerContext",
    "MetricTable",
    "ModelsOnRanks",
    "Observation",
    "Plot",
    "Policy",
    "PolicyInputs",
    "Prompt",
    "RankPlace",
    "Request",
    "Reward",
    "Rollout",
    "RolloutEngine",
    "Run",
    "Sampler",
    "Sampling",
    "Score",
    "Stop",
    "TokenLoss",
    "ToolError",
    "ToolReply",
    "TrainingEngine",
    "TrainingProgress",
    "UserError",
    "__version__",
    "adv_estimators",
    "check",
    "envs",
    "evaluate",
    "idempotency_key",
    "load_run",
    "make_prompt",
    "padded",
    "policy_losses",
    "reward_managers",
    "rollout_engines",
    "rule_rewards",
    "samplers",
    "tool",
    "tool_class",
    "train",
    "training_engines",
    "with_part",
]
"""A name that leaves this list breaks somebody's script: say so in the changelog."""


def test_the_surface_is_what_it_was():
    assert sorted(luyen.__all__) == sorted(SURFACE)
    assert dir(luyen) == sorted(luyen.__all__)


def test_every_name_can_be_loaded():
    for name in SURFACE:
        assert vars(luyen).get(name) is not None or luyen.__getattr__(name) is not None


def test_a_name_that_is_not_there_is_an_attribute_error():
    assert not hasattr(luyen, "crew")


def test_types_are_declared_for_every_name():
    stub = ast.parse((ROOT / "src/luyen/__init__.pyi").read_text())
    imported = {a.asname for n in stub.body if isinstance(n, ast.ImportFrom) for a in n.names}
    assert imported == set(SURFACE) - {"__version__"}


def test_the_page_lists_every_name():
    page = (ROOT / "docs/api.md").read_text()
    table = page[page.index("## Names") :]
    assert set(re.findall(r"`(\w+)`", table)) - {"padded"} >= set(SURFACE) - {
        "__version__",
        "padded",
    }


def test_importing_the_package_loads_nothing_heavy():
    heavy = "{'torch', 'transformers', 'ray'}"
    code = f"import sys, luyen; luyen.check; print(*{heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_train_is_called_whether_or_not_its_package_was_imported():
    code = """
import luyen
def refused():
    try:
        luyen.train({"trainer.total_training_steps": 0})
    except luyen.UserError as error:
        return "total_training_steps" in str(error)
first = refused()
import luyen.train.metric_names
print(first, refused(), callable(luyen.train))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True", "True"]
