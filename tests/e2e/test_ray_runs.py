"""Whole runs on Ray: two ranks that train with FSDP2, two replicas that draw, the same numbers."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from luyen.base.digests import read_digests
from luyen.studio.replay.record import ReplayRecord
from luyen.studio.replay.replay import replay_rollout, replay_step
from luyen.studio.timeline import TimedSpan, read_processes
from luyen.telemetry.metrics import read_metrics
from luyen.telemetry.rollout_files import read_rollouts
from luyen.telemetry.spans import SPANS
from luyen.train import loop
from luyen.train.loop import prefetch_next_step, train_online
from luyen.train.run import OnlineRun
from tests.runs import CHATTY, MODEL, ROLLOUT, Ran, close, prepare, read_back, train

ray = pytest.importorskip("ray", reason="the extra `ray` is not installed")
CLUSTER = ("trainer.n_gpus_per_node=2", f"{ROLLOUT}.data_parallel_size=2")
STEPS = ("trainer.total_training_steps=3", "trainer.save_freq=1")
PPO = ("algorithm.adv_estimator=gae", "critic.optim.lr=1.0e-3", f"{ROLLOUT}.n=2")
LIMITED = (f"{ROLLOUT}.min_p=0.01", f"{ROLLOUT}.min_new_tokens=3", f"{ROLLOUT}.stop=[zz, '77', qq]")
KINDS = {
    "PPO with tools": (*CHATTY, *PPO, *LIMITED),
    "GRPO with LoRA and a reference": (
        f"{MODEL}.lora_rank=4",
        "actor_rollout_ref.actor.use_kl_loss=true",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=64",
    ),
    "GRPO beside a teacher": (
        "distill.on_policy=true",
        "distill.teacher_path=builtin://arithmetic",
        "distill.task_weight=0.5",
    ),
}


@pytest.fixture(scope="module", autouse=True)
def cluster(cluster_address: str) -> Iterator[None]:
    """One cluster for all runs: each connects to it, and leaves it."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("RAY_ADDRESS", cluster_address)
        yield


LATER = [pytest.param(name, marks=pytest.mark.slow) for name in list(KINDS)[1:]]


@pytest.fixture(scope="module", params=["PPO with tools", *LATER])
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """The same run in this process and on the cluster."""
    words = (*KINDS[request.param], *STEPS)
    here = train(tmp_path_factory.mktemp("here"), *words)
    more = ("trainer.profile.steps=[2]", f"{ROLLOUT}.free_cache_engine=true")
    there = traced(tmp_path_factory.mktemp("there"), *words, *CLUSTER, *more)
    return here, there


def traced(folder: Path, *words: str) -> Ran:
    """A run whose spans are written, as those of the command are."""
    run = prepare(folder, *words)
    SPANS.open(run.recorder.directory.events, process="controller")
    try:
        train_online(run)
    finally:
        close(run)
        SPANS.close()
    return read_back(run.recorder.directory.root)


def test_a_profiled_step_leaves_a_trace_of_every_process(runs: tuple[Ran, Ran]):
    folder = runs[1].root / "profile"
    others = ("", "_actor_0", "_actor_1", "_rollout_0", "_rollout_1")
    kinds = {"trace": "json.gz", "operators": "txt"}
    assert {path.name for path in folder.iterdir()} == {
        f"{kind}_step_000002{process}.{ending}"
        for process in others
        for kind, ending in kinds.items()
    }
    for process in others[1:]:
        assert "aten::" in (folder / f"operators_step_000002{process}.txt").read_text()


def rollouts(run: Ran, step: int):
    return [one.rollout for one in read_rollouts(run.root / f"rollouts/step_{step:06d}.parquet")]


def timeless(rollout):
    return rollout.tokens, rollout.logps, rollout.stop, rollout.text, rollout.score


def test_the_first_step_draws_the_same_rollouts_to_the_bit(runs: tuple[Ran, Ran]):
    here, there = (list(map(timeless, rollouts(run, 1))) for run in runs)
    assert here == there


def test_losses_and_norms_are_those_of_one_process(runs: tuple[Ran, Ran]):
    here, there = runs
    names = [
        n for n in here.metrics[0] if n.startswith(("actor/", "critic/", "reward/", "distill/"))
    ]
    for one, other in zip(here.metrics, there.metrics, strict=True):
        for name in names:
            norm = name.endswith("grad_norm")
            assert other[name] == pytest.approx(one[name], rel=2e-4 if norm else 1e-4, abs=1e-5), (
                name
            )


def test_ranks_that_divide_sequences_train_as_one_process(tmp_path: Path):
    """Two ranks compute each sequence together, with half of the token budget each."""
    words = (
        *PPO,
        "trainer.total_training_steps=2",
        "actor_rollout_ref.rollout.data_parallel_size=1",
    )
    halves = (
        "trainer.n_gpus_per_node=2",
        "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size=2",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=32",
    )
    here = train(tmp_path / "here", *words, "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=64")
    there = train(tmp_path / "there", *words, *halves)
    assert list(map(timeless, rollouts(here, 1))) == list(map(timeless, rollouts(there, 1)))
    for one, other in zip(here.metrics, there.metrics, strict=True):
        for name in ("actor/pg_loss", "critic/vf_loss", "actor/grad_norm", "critic/grad_norm"):
            assert other[name] == pytest.approx(one[name], rel=2e-4, abs=1e-5), name
        assert other["parity/max_gap"] == 0.0


def test_ranks_that_divide_layers_train_as_one_process(tmp_path: Path):
    """Replicas generate with whole layers, whose sums the ranks make in another order."""
    words = (
        *PPO,
        "trainer.total_training_steps=2",
        "actor_rollout_ref.rollout.data_parallel_size=1",
    )
    halves = (
        "trainer.n_gpus_per_node=2",
        "actor_rollout_ref.actor.fsdp_config.tensor_parallel_size=2",
    )
    here, there = train(tmp_path / "here", *words), train(tmp_path / "there", *words, *halves)
    assert list(map(timeless, rollouts(here, 1))) == list(map(timeless, rollouts(there, 1)))
    for one, other in zip(here.metrics, there.metrics, strict=True):
        for name in ("actor/pg_loss", "critic/vf_loss", "actor/grad_norm", "critic/grad_norm"):
            assert other[name] == pytest.approx(one[name], rel=2e-4, abs=1e-5), name
        assert other["parity/max_gap"] < 1e-4


def test_on_recorded_batches_one_process_finds_the_same(runs: tuple[Ran, Ran]):
    """Each step of the cluster, trained again here from the checkpoint before it."""
    record = ReplayRecord(runs[1].root)
    for step in (2, 3):
        again = replay_step(record, step, silent)
        losses = [name for name in again.numbers if name.endswith(("_loss", "grad_norm"))]
        assert "actor/pg_loss" in losses
        for name in losses:
            number = again.numbers[name]
            tolerance = {"rel": 1e-5} if name.endswith("grad_norm") else {"abs": 1e-6}
            assert number.after == pytest.approx(number.before, **tolerance), (step, name)


def silent(*_: object) -> None:
    """Nobody watches."""


@pytest.mark.parametrize("step", [2, 3])
def test_later_rollouts_are_those_of_a_local_engine_with_the_same_weights(
    runs: tuple[Ran, Ran], step: int
):
    record = ReplayRecord(runs[1].root)
    for rollout in rollouts(runs[1], step)[:4]:
        again = replay_rollout(record, step, f"{rollout.group}/{rollout.sample}", silent)
        assert again.is_equal, rollout.group


def test_the_gap_between_trainer_and_sampler_stays_zero(runs: tuple[Ran, Ran]):
    assert set(runs[1].course("parity/max_gap")) == {0.0}


def test_weights_stay_close(runs: tuple[Ran, Ran]):
    here, there = runs
    assert here.weights.keys() == there.weights.keys()
    for name, weight in here.weights.items():
        torch.testing.assert_close(there.weights[name], weight, rtol=1e-3, atol=2e-5)


INSIDE = {
    "update_actor": (("update",), "update"),
    "publish": (("update", "generate"), "generate"),
    "draw": (("update", "digest", "generate"), "generate"),
}
"""Work of ranks and replicas: phases of the loop in which it may begin, and where it ends."""


def test_the_timeline_shows_ranks_and_replicas_inside_the_phases(runs: tuple[Ran, Ran]):
    """To within twice the bound of the clocks' error, and a millisecond."""
    controller, *others = read_processes(runs[1].root)
    assert [(one.role, one.index) for one in others] == [
        ("actor", 0),
        ("actor", 1),
        ("rollout", 0),
        ("rollout", 1),
    ]
    for process in others:
        assert process.clock_error_s is not None
        assert process.clock_error_s < 1.0
        slack = 2 * process.clock_error_s + 1e-3
        work = [span for span in process.spans if span.name in INSIDE]
        assert len(work) >= 3, process.name
        for span in work:
            assert any(
                start - slack <= span.start <= span.end <= end + slack
                for start, end in stretches(controller.spans, *INSIDE[span.name])
            ), (process.name, span)


def stretches(
    phases: Sequence[TimedSpan], first: Sequence[str], last: str
) -> list[tuple[float, float]]:
    """From each phase of some names to the end of the last of another before the next update."""
    whole = max(phase.end for phase in phases)
    updates = [phase.start for phase in phases if phase.name == "update"]
    found: list[tuple[float, float]] = []
    for one in (phase for phase in phases if phase.name in first):
        before = min((start for start in updates if start > one.start), default=whole)
        ends = [p.end for p in phases if p.name == last and one.start <= p.start < before]
        found.append((one.start, max(ends, default=whole)))
    return found


def test_publications_memory_and_waits_are_logged_at_every_step(runs: tuple[Ran, Ran]):
    here, there = (read_metrics(run.root / "metrics.jsonl") for run in runs)
    size = sum(weight.numel() * weight.element_size() for weight in runs[1].weights.values())
    for line in there:
        values = line.values
        publications = 2 if line is there[0] else 1  # the first step has the initial one as well
        assert values["publish/bytes"] == publications * size
        assert values["publish/parameters"] == len(runs[1].weights)
        assert 0 < values["time/publish"] <= values["time/step"]
        assert values["wait/controller_on_actor"] > 0
        assert values["wait/controller_on_rollout"] > 0
        for role in ("actor", "rollout"):
            assert 0 < values[f"role/{role}/busy"] <= 1
            assert values[f"role/{role}/memory_gb"] > 0.05
            assert values[f"wait/{role}_idle"] >= 0
    for line in here:
        shares = [line.values[f"role/{role}/busy"] for role in ("actor", "rollout")]
        assert all(0 < share < 1 for share in shares)
        assert line.values["role/controller/memory_gb"] > 0.05


def test_rollouts_that_are_asked_for_early_are_those_asked_for_in_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A checkpoint after each step leaves no room to ask for the next one early."""
    early: list[int] = []

    def counted(run: OnlineRun) -> None:
        prefetch_next_step(run)
        early.append(len(run.scheduler.outstanding))

    monkeypatch.setattr(loop, "prefetch_next_step", counted)
    words = ("algorithm.adv_estimator=remax", "trainer.total_training_steps=3", *CLUSTER)
    often, once = (
        train(tmp_path / str(every), *words, f"trainer.save_freq={every}") for every in (1, -1)
    )
    assert early == [0, 0, 0, 1, 1, 0]
    first, second = (read_digests(run.root / "digests.jsonl") for run in (often, once))
    assert [line.chain for line in first] == [line.chain for line in second]


@pytest.mark.slow
def test_a_run_of_one_process_goes_on_with_two_ranks(tmp_path: Path):
    """A checkpoint does not know how many saved it."""
    words = (*KINDS["PPO with tools"], *STEPS)
    train(tmp_path, *words, "trainer.total_training_steps=1")
    went_on = train(tmp_path, *words, *CLUSTER)
    assert went_on.course("step") == [1.0, 2.0, 3.0]
