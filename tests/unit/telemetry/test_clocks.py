"""Clocks that differ are read to within a bound that the round trips give."""

from hypothesis import given
from hypothesis import strategies as st

from luyen.telemetry.worker_spans import RemoteClock, RoundTrip

WAYS = st.floats(0.0, 5.0)


def trip(at: float, *, there: float, work: float, back: float, ahead: float) -> RoundTrip:
    """A question that takes so long there and back, to a clock that is ahead by so much."""
    came = at + there
    return RoundTrip(
        sent=at, came=came + ahead, answered=came + work + ahead, back=came + work + back
    )


@given(
    ahead=st.floats(-1e4, 1e4),
    ways=st.lists(st.tuples(WAYS, WAYS, WAYS), min_size=1, max_size=9),
)
def test_the_offset_is_right_to_within_its_bound(
    ahead: float, ways: list[tuple[float, float, float]]
):
    clock = RemoteClock()
    for number, (there, work, back) in enumerate(ways):
        clock.heard(trip(100.0 * number, there=there, work=work, back=back, ahead=ahead))
    assert clock.error_s is not None
    assert abs(clock.ours(5000.0 + ahead) - 5000.0) <= clock.error_s + 1e-9
    shortest = min((there + back) / 2 for there, _, back in ways)
    assert abs(clock.error_s - shortest) < 1e-9


def test_work_in_between_does_not_blur_the_bound():
    clock = RemoteClock()
    clock.heard(trip(0.0, there=0.001, work=600.0, back=0.001, ahead=-3.0))
    assert clock.error_s is not None
    assert abs(clock.error_s - 0.001) < 1e-9
    assert abs(clock.ours(97.0) - 100.0) < 1e-9


def test_a_clock_that_drifts_is_followed():
    clock = RemoteClock()
    clock.heard(trip(0.0, there=0.001, work=0.0, back=0.001, ahead=0.0))
    for number in range(64):
        clock.heard(trip(1.0 + number, there=0.1, work=0.0, back=0.1, ahead=50.0))
    assert abs(clock.ours(150.0) - 100.0) <= 0.1


def test_a_clock_that_was_set_meanwhile_says_nothing():
    clock = RemoteClock()
    clock.heard(RoundTrip(sent=0.0, came=10.0, answered=99.0, back=1.0))
    assert clock.error_s is None
    assert clock.ours(7.0) == 7.0
