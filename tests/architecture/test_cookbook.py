"""The cookbook can be followed: recipes pass, commands can be given, the table is the plan's."""

import importlib.util
import re
import shlex
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from luyen.config.check import Report, check
from luyen.config.machine import Machine
from luyen.config.memory import plan_memory
from luyen.runtime.ray.pools import NodeOffer, PoolFacts, plan_pools
from tests.architecture.pages import blocks, commands
from tests.architecture.tree import ROOT

PAGES = {path.stem: path.read_text() for path in sorted((ROOT / "docs" / "cookbook").glob("*.md"))}
RECIPES = sorted((ROOT / "recipes" / "cluster").glob("*.yaml"))
SLURM = ROOT / "examples" / "slurm" / "two_nodes.sh"
KUBERAY = ROOT / "examples" / "kuberay" / "two_nodes.yaml"
GIB = 1024**3
GPUS = Machine(cpus=64, ram_bytes=512 * GIB, gpu_bytes=(80 * GIB,) * 16)
ASSIGNMENT = re.compile(r"[A-Z_]+=\S*")


def demand_sound(report: Report) -> Report:
    """No error and no warning."""
    assert list(report.problems) == []
    return report


def checked(words: Sequence[str]) -> Report:
    files = [ROOT / word for word in words if "=" not in word]
    return demand_sound(check(files, [w for w in words if "=" in w], machine=GPUS))


def lines() -> Iterator[tuple[str, list[str]]]:
    """(page, words) of every command of the cookbook, variables before it left out."""
    for page, text in PAGES.items():
        body = "\n".join(blocks(text, "sh", "console", "bash"))
        for line in filter(None, body.splitlines()):
            words = shlex.split(line, comments=True)
            while words and ASSIGNMENT.fullmatch(words[0]):
                words = words[1:]
            yield page, words
        for program in ("luyen", "sbatch", "ray"):
            inline = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
            yield from ((page, words) for words in commands(inline, program))


def refused(words: list[str]) -> str | None:
    """Why a command could not be given; None where it could."""
    match words:
        case ["luyen", "check" | "train", *rest]:
            named = [w for w in rest if not w.startswith("--") and not w.isdigit()]
            checked(named) if named else None
        case ["luyen", *_]:
            return None  # its name and options are read with those of all pages
        case ["ray", *rest]:
            return _refused_by_ray(rest)
        case ["sbatch", *rest]:
            script, *given = [word for word in rest if not word.startswith("--")]
            assert (ROOT / script).is_file()
            checked(given)
        case ["kubectl", "apply", "-f", file]:
            return None if (ROOT / file).is_file() else "no such file"
        case ["kubectl", "logs", *_] | ["pip", "install", "luyen[ray]"]:
            return None
        case ["python", file]:
            return None if (ROOT / file).is_file() else "no such file"
        case ["export", *pairs] if all(ASSIGNMENT.fullmatch(pair) for pair in pairs):
            return None
        case _:
            return "nobody knows this command"
    return None


def _refused_by_ray(words: list[str]) -> str | None:
    scripts = pytest.importorskip("ray.scripts.scripts", reason="the extra `ray` is missing")
    command = scripts.cli.commands[words[0]]
    command.make_context(words[0], list(words[1:]))
    return None


@pytest.mark.parametrize("page", PAGES)
def test_every_command_of_a_page_can_be_given(page: str):
    assert [(w, why) for p, w in lines() if p == page and (why := refused(w))] == []


@pytest.mark.parametrize("page", PAGES)
def test_a_page_shows_recipes_as_they_are(page: str):
    for block in blocks(PAGES[page], "yaml"):
        name, _, body = block.partition("\n")
        assert body == (ROOT / name.removeprefix("# ")).read_text(), f"{page}: {name}"


def test_every_recipe_for_a_cluster_is_sound_and_shown():
    shown = "".join(PAGES.values())
    for path in RECIPES:
        demand_sound(check([path], machine=GPUS))
        assert path.relative_to(ROOT).as_posix() in shown, path.name


@pytest.mark.parametrize("path", [p for p in RECIPES if p.stem not in ("cpu", "qwen_7b")])
def test_a_recipe_fits_gpus_of_80_gib(path: Path):
    report = check([path], machine=GPUS)
    shape = sizing().SHAPES["7B"]
    memory = plan_memory(report.config, shape, report.plan.batch, report.plan.where, GPUS)
    assert memory.fits, memory.peak
    assert memory.kv_budget > 10 * GIB


def sizing() -> ModuleType:
    """The script that prints the table."""
    spec = importlib.util.spec_from_file_location("sizing", ROOT / "examples" / "sizing.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_sizing_table_is_what_the_script_prints():
    assert sizing().table() in PAGES["sizing"], "run python examples/sizing.py"


def test_the_slurm_script_is_a_script_and_its_nodes_are_enough():
    subprocess.run(["bash", "-n", str(SLURM)], check=True)
    text = SLURM.read_text()
    nodes, gpus = (
        int(re.findall(rf"^#SBATCH --{name}=(\d+)$", text, re.MULTILINE)[0])
        for name in ("nodes", "gpus-per-node")
    )
    said = re.findall(r"^luyen train (.*) &$", text, re.MULTILINE)
    assert said == [
        '"$@" trainer.nnodes="$SLURM_NNODES" trainer.n_gpus_per_node="$SLURM_GPUS_ON_NODE"'
    ]
    words = [f"trainer.nnodes={nodes}", f"trainer.n_gpus_per_node={gpus}"]
    demand_room(checked(["recipes/cluster/two_nodes.yaml", *words]), [(64, gpus)] * nodes)


def test_the_manifest_of_kubernetes_runs_a_sound_recipe_on_enough_nodes():
    manifest: dict[str, Any] = yaml.safe_load(KUBERAY.read_text())
    assert (manifest["apiVersion"], manifest["kind"]) == ("ray.io/v1", "RayJob")
    spec = manifest["spec"]
    program, command, *words = shlex.split(spec["entrypoint"])
    assert (program, command) == ("luyen", "train")
    offers: list[tuple[int, int]] = []
    mounts: list[str] = []
    for group in spec["rayClusterSpec"]["workerGroupSpecs"]:
        [container] = group["template"]["spec"]["containers"]
        limits = container["resources"]["limits"]
        assert limits == container["resources"]["requests"]
        offers += [(int(limits["cpu"]), limits["nvidia.com/gpu"])] * group["replicas"]
        mounts += [mount["mountPath"] for mount in container["volumeMounts"]]
    report = checked(words)
    demand_room(report, offers)
    assert any(report.config.trainer.default_local_dir.startswith(path) for path in mounts)


def demand_room(report: Report, offers: Sequence[tuple[int, int]]) -> None:
    """The nodes can hold every pool of the run."""
    nodes = [NodeOffer(name=str(i), cpus=c, gpus=g) for i, (c, g) in enumerate(offers)]
    plan_pools(PoolFacts.of(report.config, report.plan.where), nodes)


def test_a_command_that_cannot_be_given_is_caught():
    assert refused(["rye", "start"]) == "nobody knows this command"
    with pytest.raises(AssertionError):
        refused(["luyen", "train", "recipes/quickstart.yaml", "trainer.nnodez=2"])
