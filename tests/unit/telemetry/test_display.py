"""The display shows what it is told, in a terminal and without one."""

import io
from threading import Event

import pytest
from rich.console import Console

from luyen.telemetry import display
from luyen.telemetry import display as module
from luyen.telemetry.display import (
    LiveDisplay,
    PlainDisplay,
    SilentDisplay,
    duration,
    open_display,
    sparkline,
)
from luyen.telemetry.progress import ProgressState

METRICS = {
    "reward/mean": 0.51234,
    "actor/entropy": 1.25,
    "response_length/mean": 31.0,
    "actor/ppo_kl": 0.00214,
    "parity/max_gap": 0.0,
    "time/tokens_per_s": 12345.6,
}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def test_a_plain_line_has_every_figure_and_the_time_left(clock: list[float]):
    stream = io.StringIO()
    shown = PlainDisplay(stream)
    shown.start(120)
    clock[0] += 10
    shown.phase("generate")
    shown.step(2, METRICS)
    shown.close()
    assert stream.getvalue() == (
        "step   2/120  reward 0.512  entropy 1.250  length 31.0  update KL 0.0021  parity gap 0  "
        "tokens/s 12,346  10s gone, 9m50s left\n"
    )


def test_a_figure_that_was_not_measured_is_not_in_the_line(clock: list[float]):
    stream = io.StringIO()
    shown = PlainDisplay(stream)
    shown.start(10)
    shown.step(0, {"reward/mean": 0.5})
    assert stream.getvalue() == "step  0/10  reward 0.500  0s gone, ? left\n"


def test_steps_of_an_earlier_session_do_not_speed_up_this_one(clock: list[float]):
    stream = io.StringIO()
    shown = PlainDisplay(stream)
    shown.start(100, done=90)
    clock[0] += 8
    shown.step(92, {})
    assert stream.getvalue() == "step  92/100  8s gone, 32s left\n"


def screen(width: int) -> tuple[Console, io.StringIO]:
    stream = io.StringIO()
    return Console(file=stream, width=width, force_terminal=True, color_system=None), stream


def test_the_panel_shows_phases_figures_and_the_course_of_the_reward(clock: list[float]):
    console, stream = screen(100)
    shown = LiveDisplay(console)
    shown.start(4)
    shown.phase("generate")
    clock[0] += 1.5
    shown.phase("score")
    for step, reward in enumerate((0.1, 0.9), 1):
        shown.step(step, {**METRICS, "reward/mean": reward})
    clock[0] += 0.5
    shown.phase("validate")
    shown.close()
    last = stream.getvalue().split("luyen")[-1]
    assert "step 2/4" in last
    assert "2s gone, 2s left" in last
    assert "generate 1.5s" in last
    assert "score 0.5s" in last
    assert "validate 0.0s" in last
    assert "0.900" in last
    assert "12,346" in last
    assert "reward ▁█" in last


def test_what_is_waited_for_stands_before_the_first_step(clock: list[float]):
    stream = io.StringIO()
    plain = PlainDisplay(stream)
    plain.waiting("reading [rows]")
    plain.start(4)
    plain.step(1, {})
    assert stream.getvalue().splitlines()[0] == "reading [rows]"
    console, stream = screen(60)
    live = LiveDisplay(console)
    live.waiting("reading [rows]")
    live.start(4)
    live.close()
    assert stream.getvalue().index("reading [rows]") < stream.getvalue().index("luyen")


def test_a_narrow_terminal_still_shows_every_number(clock: list[float]):
    console, stream = screen(60)
    shown = LiveDisplay(console)
    shown.start(4)
    shown.step(1, METRICS)
    shown.close()
    last = stream.getvalue().split("luyen")[-1]
    assert all(text in last for text in ("0.512", "1.250", "31.0", "0.0021", "12,346"))
    assert max(map(len, last.splitlines())) <= 60


def test_the_form_follows_the_stream(monkeypatch: pytest.MonkeyPatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert isinstance(open_display(io.StringIO()), PlainDisplay)
    assert isinstance(open_display(Terminal()), LiveDisplay)
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(open_display(Terminal()), PlainDisplay)


def test_a_silent_display_says_nothing(capsys: pytest.CaptureFixture[str]):
    shown = SilentDisplay()
    shown.waiting("reading")
    shown.start(1)
    shown.phase("generate")
    shown.step(1, METRICS)
    shown.close()
    assert capsys.readouterr() == ("", "")


def test_bars_follow_the_values_and_skip_what_is_not_finite():
    assert sparkline([1.0, 1.0], 10) == "▁▁"
    assert sparkline([0.0, float("nan"), 7.0, 3.0], 10) == "▁█▄"
    assert sparkline([float(n) for n in range(100)], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([], 10) == ""


def test_durations_are_readable():
    assert [duration(s) for s in (0.9, 59.9, 60, 3599, 3600, 90061)] == [
        "0s",
        "59s",
        "1m00s",
        "59m59s",
        "1h00m",
        "25h01m",
    ]


def test_a_stage_of_a_pipeline_is_named_on_both_displays(clock: list[float]):
    token = module.HEADING.set("stage 2 of 3: rl")
    try:
        console, drawn = screen(80)
        live, stream = LiveDisplay(console), io.StringIO()
        plain = PlainDisplay(stream)
    finally:
        module.HEADING.reset(token)
    for shown in (live, plain):
        shown.start(10)
        shown.step(1, {"reward/mean": 0.5})
        shown.close()
    assert "luyen: stage 2 of 3: rl" in drawn.getvalue()
    assert stream.getvalue().startswith("step  1/10  stage 2 of 3: rl  reward 0.500")


def test_each_kl_is_called_what_it_is_and_tool_calls_are_shown():
    stream = io.StringIO()
    shown = PlainDisplay(stream)
    shown.step(1, {"actor/ref_kl": 0.5, "actor/ppo_kl": 0.001, "tools/call_fraction": 0.25})
    assert "calls a tool 25%  KL to ref 0.5000  update KL 0.0010" in stream.getvalue()


@pytest.mark.parametrize(("mean", "words"), [(0.25, "accuracy 0.250"), (0.4, "val reward 0.400")])
def test_a_validation_is_an_accuracy_only_where_every_score_is_0_or_1(mean: float, words: str):
    stream = io.StringIO()
    PlainDisplay(stream).step(0, {"val/accuracy": 0.25, "val/reward/mean@1": mean})
    assert stream.getvalue().startswith(f"step 0/0  {words}  ")


def test_a_long_wait_is_told_at_times_without_a_terminal(monkeypatch: pytest.MonkeyPatch):
    now = {"done": 0, "seconds": 0.0}
    told = Event()

    class Seen(io.StringIO):
        def flush(self) -> None:
            told.set()

    def watched() -> ProgressState:
        now["seconds"] += 5.0  # each look finds so much more time gone
        now["done"] += 4
        return ProgressState(
            name="validation", done=int(now["done"]), total=100, seconds=now["seconds"]
        )

    monkeypatch.setattr(display, "_LOOK_S", 0.001)
    monkeypatch.setattr(display.PROGRESS, "now", watched)
    stream = Seen()
    shown = PlainDisplay(stream)
    shown.start(30)
    assert told.wait(10)
    shown.close()
    # A tenth is done after 15 seconds: 10 have gone by, and 12 answers are there.
    first = stream.getvalue().splitlines()[0]
    assert first == "step 0/30  validation: 12 of 100 answers, 15s"


def test_the_panel_says_how_far_a_validation_is():
    progress = module.PROGRESS
    progress.expect("validation", 0, 8, restart=True)
    progress.add("validation", 0, 3)
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=100)
    shown = LiveDisplay(console)
    shown.phase("validate")
    with progress.watching("validation", 0):
        console.print(shown._render())
    assert "validate 0.0s, 3 of 8" in stream.getvalue()


def test_a_terminal_that_claims_millions_of_columns_is_drawn_with_some(monkeypatch):
    monkeypatch.setenv("COLUMNS", "99999999")
    monkeypatch.setenv("LINES", "99999999")
    stream = io.StringIO()
    stream.isatty = lambda: True
    monkeypatch.setenv("TERM", "xterm")
    panel = module.open_display(stream)
    assert isinstance(panel, module.LiveDisplay)
    panel.step(1, {"reward/mean": 0.5})
    panel.close()
    assert len(stream.getvalue()) < 10**6
