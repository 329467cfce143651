"""What the journal has is not done again; what nobody knows follows the stated policy."""

from dataclasses import replace

import pytest

from luyen.base.records import GroupId, StopReason, make_prompt
from luyen.data.render import Renderer
from luyen.rollout.env.protocol import Observation
from luyen.rollout.multi_turn import FaultPolicy
from luyen.rollout.protocol import Sampling
from luyen.rollout.single_turn import PromptRequest, submit_requests
from luyen.rollout.tools import idempotency_key, tool, tool_class
from luyen.rollout.tools.registry import ToolRegistry
from luyen.telemetry.journal import WorkJournal
from tests.talk import TOKENIZER, ScriptedEngine, World, call, play, setting


def asks_then_answers(text: str, _: int) -> str:
    return "3<|im_end|>" if "<tool_response>" in text else call("add", a=1, b=2) + "<|im_end|>"


def adding(log: list[str | None]):
    @tool
    async def add(a: int, b: int) -> str:
        """Add two numbers."""
        log.append(idempotency_key())
        return str(a + b)

    return add


def draw_of(samples: int) -> PromptRequest:
    prompt = make_prompt([{"role": "user", "content": "q"}])
    return PromptRequest(
        group=GroupId(step=0, draw=0, uid=prompt.uid), prompt=prompt, samples=samples
    )


def answered(journal: WorkJournal, samples: int, *, is_batch_invariant: bool = True):
    class Engine(ScriptedEngine):
        @property
        def is_batch_invariant(self) -> bool:
            return is_batch_invariant

    engine = Engine(lambda text, key: f"{key % 7}<|im_end|>")
    sampling = Sampling(max_new_tokens=9, stop_ids=TOKENIZER.stop_ids)
    asked = submit_requests(
        engine,
        Renderer(TOKENIZER),
        [draw_of(samples)],
        sampling,
        seed=0,
        purpose="rollout",
        version=1,
        journal=journal,
    )
    [group] = asked()
    journal.close()
    return group.rollouts, sum(len(request.keys) for request in engine.requests)


def test_answers_in_the_journal_are_not_drawn_again(taken_up):
    first, drawn = answered(taken_up(), 4)
    assert drawn == 4
    again, drawn = answered(taken_up(), 6)
    assert drawn == 2
    assert again[:4] == first
    assert [rollout.sample for rollout in again] == list(range(6))


def test_where_answers_depend_on_their_neighbours_all_are_taken_or_none(taken_up):
    answered(taken_up(), 4)
    assert answered(taken_up(), 4, is_batch_invariant=False)[1] == 0
    assert answered(taken_up(), 6, is_batch_invariant=False)[1] == 6


def test_conversations_in_the_journal_are_not_played_again(taken_up):
    log: list[str | None] = []
    how = setting([adding(log)])
    journal = taken_up()
    [first] = play(ScriptedEngine(asks_then_answers), how, "q", samples=2, journal=journal)
    journal.close()
    journal, engine = taken_up(), ScriptedEngine(asks_then_answers)
    [again] = play(engine, how, "q", samples=2, journal=journal)
    journal.close()
    assert (again, engine.requests, len(log)) == (first, [], 2)
    assert len(set(log)) == 2
    assert None not in log


def killed_before(taken_up, how, *kinds: str) -> None:
    """One conversation of a process that died before it wrote records of these kinds."""
    journal = taken_up()
    play(ScriptedEngine(asks_then_answers), how, "q", journal=journal)
    assert journal._file is not None
    path = journal._file.path
    journal.close()
    lines = path.read_text().splitlines(keepends=True)
    marks = [f'"kind": "{kind}"' for kind in kinds]
    path.write_text("".join(line for line in lines if not any(m in line for m in marks)))


def test_a_result_in_the_journal_stands_for_the_call(taken_up):
    log: list[str | None] = []
    how = setting([adding(log)])
    killed_before(taken_up, how, "rollout")
    assert len(log) == 1
    journal = taken_up()
    [group] = play(ScriptedEngine(asks_then_answers), how, "q", journal=journal)
    journal.close()
    assert len(log) == 1
    assert group.rollouts[0].calls[0].result == "3"
    assert group.rollouts[0].stop == StopReason.ANSWERED


def test_a_session_that_remembers_is_called_again(taken_up):
    log: list[int] = []

    @tool_class(name="add")
    class Add:
        def call(self, a: int, b: int) -> str:
            """Add two numbers."""
            log.append(a)
            return str(a + b)

    how = setting([Add])
    killed_before(taken_up, how, "rollout")
    journal = taken_up()
    [group] = play(ScriptedEngine(asks_then_answers), how, "q", journal=journal)
    journal.close()
    assert len(log) == 2
    assert group.rollouts[0].fault is None


def test_a_function_that_changes_its_world_is_called_again(taken_up):
    class Counting(World):
        """Its reward is the number of calls that it has seen."""

        def __init__(self) -> None:
            super().__init__()
            self.seen = 0

            @tool
            async def add(a: int, b: int) -> str:
                """Add two numbers."""
                self.seen += 1
                return str(a + b)

            self.tools = (add,)

        async def act(self, messages):
            return Observation(is_done=True)

        async def score(self):
            return float(self.seen)

    how = setting(env=lambda _: Counting())
    killed_before(taken_up, how, "rollout")
    journal = taken_up()
    [group] = play(ScriptedEngine(asks_then_answers), how, "q", journal=journal)
    journal.close()
    assert group.rollouts[0].given == ((1, 1.0),)


@pytest.mark.parametrize("on_unknown", ["retry", "fault"])
def test_a_call_that_nobody_knows_of_follows_the_policy(taken_up, on_unknown: str):
    log: list[str | None] = []
    policy = FaultPolicy(on_fault="retry", retries=3)
    how = replace(setting([adding(log)]), on_unknown=on_unknown)
    killed_before(taken_up, how, "rollout", "result")
    for _ in range(2):
        journal = taken_up()
        [group] = play(ScriptedEngine(asks_then_answers), how, "q", policy=policy, journal=journal)
        journal.close()
        [rollout] = group.rollouts
        if on_unknown == "fault":
            assert rollout.fault is not None
            assert "it is unknown whether it acted" in rollout.fault
            assert len(log) == 1
        else:
            assert rollout.fault is None
            assert log == [log[0]] * 2


def test_what_broke_is_tried_again_by_the_next_process(taken_up):
    log: list[str | None] = []

    @tool
    async def add(a: int, b: int) -> str:
        """Add two numbers."""
        log.append(idempotency_key())
        if len(log) == 1:
            raise RuntimeError("no connection")
        return str(a + b)

    how = setting(box=ToolRegistry([add], on_error="fault"))
    for sound in (False, True):
        journal = taken_up()
        [group] = play(ScriptedEngine(asks_then_answers), how, "q", journal=journal)
        journal.close()
        assert (group.rollouts[0].fault is None) == sound
    assert log == [log[0]] * 2
