"""What `check` says of rollout engines that generate in a server."""

import importlib
import sys
from pathlib import Path

import pytest

from luyen.config.check import check

ROLLOUT = "actor_rollout_ref.rollout"
BASE = (
    "data.train_files=arithmetic://sum?digits=1&size=32",
    "data.train_batch_size=4",
    "algorithm.adv_estimator=grpo",
    f"{ROLLOUT}.n=4",
    "trainer.total_training_steps=1",
)
VLLM = (f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.server.python={sys.executable}")


def found(folder: Path, *words: str) -> dict[str, str]:
    """Fields of problems of these rules, by id."""
    report = check([], [*BASE, f"trainer.default_local_dir={folder}", *words])
    return {p.id: str(p.field) for p in report.problems if p.id.startswith("R2")}


def test_a_server_of_ours_passes_and_is_corrected(tmp_path: Path):
    assert found(tmp_path, *VLLM) == {}
    report = check([], [*BASE, *VLLM, f"trainer.default_local_dir={tmp_path}"])
    assert report.config.algorithm.rollout_correction.rollout_is == "token"


def test_the_gap_can_be_accepted_by_name(tmp_path: Path):
    none = "algorithm.rollout_correction.rollout_is=null"
    assert found(tmp_path, *VLLM, none) == {"R22": f"{ROLLOUT}.name"}
    assert found(tmp_path, *VLLM, none, f"{ROLLOUT}.server.accept_gap=true") == {}


@pytest.mark.parametrize(
    "word",
    [
        "top_k=5",
        "top_p=0.9",
        "min_p=0.1",
        "min_new_tokens=1",
        "val_kwargs={do_sample: true, temperature: 1.0, top_p: 0.9}",
    ],
)
def test_filters_are_refused(tmp_path: Path, word: str):
    assert "R21" in found(tmp_path, *VLLM, f"{ROLLOUT}.{word}")
    assert "R21" not in found(tmp_path, f"{ROLLOUT}.{word}")


def test_a_server_is_installed_somewhere(tmp_path: Path):
    missing = (f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.server.python=/nowhere/python")
    assert found(tmp_path, *missing) == {"R23": f"{ROLLOUT}.server.python"}
    assert found(tmp_path, f"{ROLLOUT}.name=vllm") == {"R23": f"{ROLLOUT}.name"}
    here = (f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.server_urls=[http://127.0.0.1:1]")
    assert found(tmp_path, *here) == {}


@pytest.mark.parametrize(
    "url",
    [
        "",
        "127.0.0.1:8000",
        "file:///etc/hostname",
        "ftp://host",
        "http://",
        "http://[::1",
        "http://a b",
        "http://host:99999",
        "http://host:0",
        "http://me:word@host",
        "http://host?key=1",
        "http://h\u00f6st",
    ],
)
def test_addresses_are_of_http_and_hold_no_password(tmp_path: Path, url: str):
    words = (f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.server_urls=['{url}']")
    assert found(tmp_path, *words) == {"R29": f"{ROLLOUT}.server_urls"}


@pytest.mark.parametrize("options", ["3", "[a]", "{port: 1}", "{host: 0.0.0.0}", "{'a b': 1}"])
def test_options_have_names_and_leave_the_address_alone(tmp_path: Path, options: str):
    words = (*VLLM, f"{ROLLOUT}.engine_kwargs={{vllm: {options}}}")
    assert found(tmp_path, *words) == {"R29": f"{ROLLOUT}.engine_kwargs"}
    fine = (*VLLM, f"{ROLLOUT}.engine_kwargs={{vllm: {{enable_prefix_caching: true}}}}")
    assert found(tmp_path, *fine) == {}


def test_running_servers_are_enough_and_take_folders(tmp_path: Path):
    two = (f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.server_urls=[http://a, http://b]")
    assert found(tmp_path, *two) == {"R24": f"{ROLLOUT}.server_urls"}
    group = (f"{ROLLOUT}.server_urls=[http://a]", f"{ROLLOUT}.server.transport=group")
    assert found(tmp_path, f"{ROLLOUT}.name=vllm", *group) == {"R24": f"{ROLLOUT}.server.transport"}
    # Any server of SGLang can join a group.
    assert found(tmp_path, f"{ROLLOUT}.name=sglang", *group) == {}


LORA = (f"{ROLLOUT}.server.lora_format=adapter", "actor_rollout_ref.model.lora_rank=4")


def test_an_adapter_is_loaded_from_a_folder(tmp_path: Path):
    assert found(tmp_path, *VLLM, *LORA) == {}
    group = f"{ROLLOUT}.server.transport=group"
    assert found(tmp_path, *VLLM, *LORA, group) == {"R26": f"{ROLLOUT}.server.transport"}
    ends = "actor_rollout_ref.model.target_modules=[q_proj, lm_head]"
    field = "actor_rollout_ref.model.target_modules"
    assert found(tmp_path, *VLLM, *LORA, ends) == {"R26": field}


@pytest.mark.parametrize("transport", ["ipc", "transfer"])
def test_transports_of_gpus_are_refused_elsewhere(tmp_path: Path, transport: str):
    key = f"{ROLLOUT}.server.transport"
    assert found(tmp_path, *VLLM, f"{key}={transport}", "trainer.device=cpu") == {"R28": key}
    sglang = (f"{ROLLOUT}.name=sglang", f"{ROLLOUT}.server_urls=[http://a]")
    assert "R28" in found(tmp_path, *sglang, f"{key}={transport}")
    if transport == "ipc":
        urls = (f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.server_urls=[http://a]")
        assert "R24" in found(tmp_path, *urls, f"{key}=ipc")


@pytest.mark.parametrize(
    "words",
    [
        (f"{ROLLOUT}.server.retries=1",),
        (f"{ROLLOUT}.server_urls=[http://a]",),
        (f"{ROLLOUT}.engine_kwargs.vllm.seed=1",),
        (f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.server_urls=[http://a]", f"{ROLLOUT}.server.python=x"),
        (*VLLM, f"{ROLLOUT}.engine_kwargs.sglang.seed=1"),
        (*VLLM, f"{ROLLOUT}.server.lora_format=adapter"),
        (*VLLM, f"{ROLLOUT}.free_cache_engine=true"),
        (f"{ROLLOUT}.server.lora_format=adapter", "actor_rollout_ref.model.lora_rank=4"),
    ],
    ids=str,
)
def test_a_key_that_is_not_read_is_named(tmp_path: Path, words: tuple[str, ...]):
    assert "R25" in found(tmp_path, *words)


def test_a_folder_with_the_name_of_a_package_is_no_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """What is started is a module of the package; nothing is imported to find it."""
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("raise AssertionError('imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    vllm = (f"{ROLLOUT}.name=vllm",)
    assert found(tmp_path, *vllm) == {"R23": f"{ROLLOUT}.name"}
    module = tmp_path / "vllm" / "entrypoints" / "openai" / "api_server.py"
    module.parent.mkdir(parents=True)
    module.write_text("")
    for folder in (module.parent, module.parent.parent):
        (folder / "__init__.py").write_text("")
    importlib.invalidate_caches()
    assert found(tmp_path, *vllm) == {}


def test_the_plan_says_where_a_server_generates(tmp_path: Path):
    """It is no part of the process that trains."""
    words = {
        f"{ROLLOUT}.name=native": "cpu, this process",
        f"{ROLLOUT}.name=vllm": "cpu, a server that it starts",
        f"{ROLLOUT}.server_urls=[http://127.0.0.1:1]": "running servers",
    }
    places: list[str] = []
    for word in words:
        more = VLLM if "name=" not in word else (word,)
        given = [*BASE, "trainer.device=cpu", *more, word, f"trainer.default_local_dir={tmp_path}"]
        roles = check([], given).plan.where.roles
        places += [role.place for role in roles if role.name == "rollout"]
    assert places == list(words.values())
