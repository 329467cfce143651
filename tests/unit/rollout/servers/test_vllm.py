"""vLLM's dialect, its command line, and the extension that runs in its workers."""

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from luyen.config.schema.actor_rollout_ref import RolloutConfig
from luyen.models.weights import tensor_digests
from luyen.rollout.protocol import Sampling
from luyen.rollout.servers.dialect import ServerFault, WeightGroup
from luyen.rollout.servers.process import free_port
from luyen.rollout.servers.vllm import VllmDialect, vllm_command, vllm_environment
from luyen.rollout.servers.vllm_worker import (
    WeightExtension,
    broadcast,
    make_group,
    tensor_digest,
)

DIALECT = VllmDialect(has_extension=True)


def body_of(**sampling: Any) -> dict[str, Any]:
    asked = Sampling(max_new_tokens=4, **sampling)
    call = DIALECT.generate("a", (1, 2), asked, seed=7, model="policy")
    assert call.path == "/v1/completions"
    assert call.body is not None
    return dict(call.body)


def test_a_request_has_tokens_a_seed_and_our_stop_conditions_only():
    body = body_of(temperature=0.7, stop_ids=frozenset({9, 3}), stop_strings=("x",))
    assert body["prompt"] == [1, 2]
    assert (body["seed"], body["n"], body["max_tokens"]) == (7, 1, 4)
    assert (body["temperature"], body["logprobs"]) == (0.7, 0)
    assert body["ignore_eos"] is True
    assert (body["stop_token_ids"], body["stop"]) == ([3, 9], ["x"])


def test_ignored_stops_are_not_sent():
    body = body_of(stop_ids=frozenset({9}), stop_strings=("x",), ignore_stop=True)
    assert "stop" not in body
    assert "stop_token_ids" not in body


def reply(**changes: Any) -> dict[str, Any]:
    choice = {
        "token_ids": [5, 6],
        "logprobs": {"token_logprobs": [-0.5, -0.25]},
        "finish_reason": "length",
        **changes,
    }
    return {"model": "policy", "choices": [choice]}


def test_a_reply_is_read():
    made = DIALECT.generated(reply())
    assert (made.tokens, made.logps) == ((5, 6), (-0.5, -0.25))
    assert (made.reason, made.model) == ("length", "policy")
    assert DIALECT.generated(reply(finish_reason="abort")).reason == "aborted"
    assert DIALECT.generated(reply(logprobs=None)).logps == ()


@pytest.mark.parametrize(
    "broken",
    [
        {},
        {"choices": []},
        {"choices": [1, 2], "model": "policy"},
        reply(finish_reason="because"),
        reply(token_ids=None),
        [],
    ],
    ids=str,
)
def test_another_shape_is_a_fault(broken: Any):
    with pytest.raises(ServerFault, match="shape"):
        DIALECT.generated(broken)


def test_workers_that_disagree_have_proved_nothing():
    same = {"results": [{"w": "a", "v": "b"}, {"w": "a", "v": "c"}]}
    assert DIALECT.read_digests(same) == {"w": "a"}
    versions = {"results": [{"version": 3}, {"version": 4}]}
    assert DIALECT.read_weight_version(versions) == "mixed"


def test_a_server_without_the_extension_reloads_folders_and_joins_no_group():
    plain = VllmDialect(has_extension=False)
    calls = plain.load_folder(Path("/weights/3"), 3)
    assert [call.path for call in calls] == ["/collective_rpc", "/update_weight_version"]
    group = WeightGroup(address="127.0.0.1", port=1, size=2, backend="gloo")
    assert plain.join_group(group) is None
    assert plain.digests() is None


def test_extra_options_win_and_null_leaves_one_out():
    rollout = RolloutConfig(
        name="vllm",
        engine_kwargs={"vllm": {"seed": 3, "max_num_seqs": None, "enable_prefix_caching": False}},
    )
    words = vllm_command(
        rollout, model=Path("m"), port=80, max_model_len=64, dtype="float32", is_cpu=False
    )
    assert words[words.index("--seed") + 1] == "3"
    assert words[words.index("--logprobs-mode") + 1] == "processed_logprobs"
    assert "--max-num-seqs" not in words
    assert "--no-enable-prefix-caching" in words


def test_the_extension_lies_alone_on_the_path_of_the_server(tmp_path: Path):
    environment = vllm_environment(tmp_path, True)
    assert environment["PYTHONPATH"] == str(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["luyen_vllm_worker.py"]
    text = (tmp_path / "luyen_vllm_worker.py").read_text()
    imports = [line.split()[1] for line in text.splitlines() if line.startswith(("import", "from"))]
    assert not [name for name in imports if name.startswith(("luyen", "vllm"))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8])
@pytest.mark.parametrize("shape", [(), (7,), (3, 5), (1 << 20, 2), (0, 4)], ids=str)
def test_the_extension_digests_as_the_trainer_does(dtype: torch.dtype, shape: tuple[int, ...]):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 9
    tensor = values.to(dtype)
    assert tensor_digest(tensor) == tensor_digests({"w": tensor})["w"]


class Worker(WeightExtension):
    """What vLLM's worker has, as far as the extension looks."""

    def __init__(self) -> None:
        self.rank = 0
        self.device = torch.device("cpu")
        self.loaded: dict[str, Tensor] = {}
        self.model_runner = SimpleNamespace(
            reload_weights=self.reload, get_model=lambda: torch.nn.Linear(2, 2)
        )

    def reload(self, weights_iterator: Any) -> None:
        self.loaded = dict(weights_iterator)


TENSORS = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}


def test_the_extension_loads_a_folder_and_says_what_it_took(tmp_path: Path):
    worker = Worker()
    assert worker.luyen_weight_version() == {"version": None}
    save_file(TENSORS, tmp_path / "model.safetensors")
    assert worker.luyen_load_folder(str(tmp_path), 4) == {"tensors": 2}
    assert worker.luyen_weight_version() == {"version": 4}
    assert worker.luyen_digests() == tensor_digests(TENSORS)


def test_a_load_that_fails_leaves_no_version(tmp_path: Path):
    worker = Worker()
    save_file(TENSORS, tmp_path / "model.safetensors")
    worker.luyen_load_folder(str(tmp_path), 4)

    def fail(weights_iterator: Any) -> None:
        next(iter(weights_iterator))
        raise ValueError("no room")

    worker.model_runner.reload_weights = fail
    with pytest.raises(ValueError, match="no room"):
        worker.luyen_load_folder(str(tmp_path), 5)
    assert worker.luyen_weight_version() == {"version": None}
    assert worker.luyen_digests() == {}


def test_tensors_arrive_over_a_process_group():
    worker, port = Worker(), free_port()
    joining = threading.Thread(
        target=worker.luyen_join_group, args=("127.0.0.1", port, 2, "gloo", 20.0)
    )
    joining.start()
    group = make_group("127.0.0.1", port, 0, 2, "gloo", 20.0)
    joining.join()
    forms = [[n, str(t.dtype).removeprefix("torch."), list(t.shape)] for n, t in TENSORS.items()]
    receiving = threading.Thread(target=worker.luyen_receive, args=(forms, 6))
    receiving.start()
    for tensor in TENSORS.values():
        broadcast(group, tensor.clone())
    receiving.join()
    assert worker.luyen_digests() == tensor_digests(TENSORS)
    assert worker.luyen_weight_version() == {"version": 6}


def test_only_a_server_on_a_gpu_sleeps():
    rollout = RolloutConfig(name="vllm", free_cache_engine=True)
    where: Any = {"model": Path("m"), "port": 1, "max_model_len": 64, "dtype": "float32"}
    assert "--enable-sleep-mode" in vllm_command(rollout, **where, is_cpu=False)
    assert "--enable-sleep-mode" not in vllm_command(rollout, **where, is_cpu=True)
