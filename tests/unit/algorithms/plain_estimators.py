"""The estimators once more, with Python floats and loops, from their formulas: no torch."""

import math
import statistics
from collections.abc import Callable, Sequence

from tests.unit.algorithms.credit_batches import Row

Table = list[list[float]]


def live(row: Row) -> list[int]:
    return [t for t, trains in enumerate(row.mask) if trains]


def outcome(row: Row) -> float:
    return sum(0.0 if math.isnan(r) else r for r in row.rewards)


def credited(row: Row) -> list[float]:
    """Reward per trainable token, in order, with those on masked tokens moved."""
    kept = live(row)
    got = [0.0] * len(kept)
    for t, reward in enumerate(row.rewards):
        if kept and not math.isnan(reward):
            earlier = [k for k, s in enumerate(kept) if s <= t]
            got[earlier[-1] if earlier else 0] += reward
    return got


def table(rows: Sequence[Row], per_live_token: Sequence[Sequence[float]]) -> Table:
    """Values of trainable tokens put back among zeros."""
    result: Table = []
    for row, values in zip(rows, per_live_token, strict=True):
        full = [0.0] * len(row.mask)
        for t, value in zip(live(row), values, strict=True):
            full[t] = value
        result.append(full)
    return result


def tiled(rows: Sequence[Row], numbers: Sequence[float]) -> Table:
    return table(rows, [[x] * len(live(r)) for r, x in zip(rows, numbers, strict=True)])


def siblings(rows: Sequence[Row], row: Row) -> list[Row]:
    return [r for r in rows if r.group == row.group]


def whitened(values: Table, rows: Sequence[Row], *, alone: bool) -> Table:
    """Whitened over trainable tokens; rows alone in their group take part only with `alone`."""
    parts = [alone or len(siblings(rows, r)) > 1 for r in rows]
    pool = [values[i][t] for i, r in enumerate(rows) if parts[i] for t in live(r)]
    if len(pool) < 2:
        return [[0.0] * len(r.mask) for r in rows]
    mean, variance = statistics.fmean(pool), statistics.variance(pool)
    scale = 1.0 / math.sqrt(variance + 1e-8)
    shown = [[(values[i][t] - mean) * scale for t in live(r)] for i, r in enumerate(rows)]
    return table(rows, [s if p else [0.0] * len(s) for s, p in zip(shown, parts, strict=True)])


def std(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def normalised(rows: Sequence[Row], score: Callable[[Row], float], eps: float) -> list[float]:
    numbers: list[float] = []
    for row in rows:
        group = [score(r) for r in siblings(rows, row)]
        numbers.append((score(row) - statistics.fmean(group)) / (std(group) + eps))
    return numbers


def grpo(rows: Sequence[Row]) -> Table:
    return tiled(rows, normalised(rows, outcome, 1e-6))


def turn_grpo(rows: Sequence[Row], gamma: float = 0.5) -> Table:
    """Against the samples that came as far as the turn; with none, the whole against the group."""

    def reached(row: Row, k: int) -> bool:
        return k == 0 or any(row.turns[t] >= k for t in live(row))

    def led_to(row: Row, k: int) -> float:
        if not live(row):
            return outcome(row)
        later = [(row.turns[t] - k, r) for t, r in zip(live(row), credited(row), strict=True)]
        return sum(gamma**n * r for n, r in later if n >= 0)

    def advantage(row: Row, k: int) -> float:
        peers = [led_to(r, k) for r in siblings(rows, row) if reached(r, k)]
        if len(peers) < 2 and k > 0:
            return advantage(row, 0)
        return (led_to(row, k) - statistics.fmean(peers)) / (std(peers) + 1e-6)

    return table(rows, [[advantage(r, r.turns[t]) for t in live(r)] for r in rows])


def grpo_passk(rows: Sequence[Row]) -> Table:
    numbers: list[float] = []
    for row in rows:
        group = sorted((outcome(r) for r in siblings(rows, row)), reverse=True)
        leads = len(group) > 1 and outcome(row) == group[0]
        numbers.append((group[0] - group[1]) / (std(group) + 1e-6) if leads else 0.0)
    return tiled(rows, numbers)


def gdpo(rows: Sequence[Row]) -> Table:
    parts = [normalised(rows, lambda r, n=name: r.parts[n], 1e-6) for name in rows[0].parts]
    return whitened(tiled(rows, [sum(p) for p in zip(*parts, strict=True)]), rows, alone=False)


def rloo(rows: Sequence[Row]) -> Table:
    numbers: list[float] = []
    for row in rows:
        others = [outcome(r) for r in siblings(rows, row) if r is not row]
        numbers.append(outcome(row) - statistics.fmean(others) if others else 0.0)
    return tiled(rows, numbers)


def opo(rows: Sequence[Row]) -> Table:
    numbers: list[float] = []
    for row in rows:
        group = siblings(rows, row)
        total = sum(len(live(r)) for r in group)
        weighted = sum(len(live(r)) * outcome(r) for r in group)
        numbers.append(outcome(row) - weighted / total if total else 0.0)
    return tiled(rows, numbers)


def gpg(rows: Sequence[Row]) -> Table:
    active = [r for r in rows if live(r)]
    alpha = len(active) / max(sum(outcome(r) != 0 for r in active), 1)
    means = [statistics.fmean(outcome(s) for s in siblings(rows, r)) for r in rows]
    return tiled(rows, [alpha * (outcome(r) - m) for r, m in zip(rows, means, strict=True)])


def reinforce_plus_plus_baseline(rows: Sequence[Row]) -> Table:
    means = [statistics.fmean(outcome(s) for s in siblings(rows, r)) for r in rows]
    centred = [outcome(r) - m for r, m in zip(rows, means, strict=True)]
    return whitened(tiled(rows, centred), rows, alone=False)


def gae(rows: Sequence[Row], gamma: float = 0.9, lam: float = 0.8) -> Table:
    return whitened(raw_gae(rows, gamma, lam), rows, alone=True)


def raw_gae(rows: Sequence[Row], gamma: float, lam: float) -> Table:
    result: list[list[float]] = []
    for row in rows:
        values = [row.values[t] for t in live(row)]
        next_value, advantage, out = 0.0, 0.0, list[float]()
        for value, reward in reversed(list(zip(values, credited(row), strict=True))):
            advantage = reward + gamma * next_value - value + gamma * lam * advantage
            next_value = value
            out.append(advantage)
        result.append(out[::-1])
    return table(rows, result)


def reinforce(rows: Sequence[Row], gamma: float = 0.9) -> Table:
    result: list[list[float]] = []
    for row in rows:
        total, out = 0.0, list[float]()
        for reward in reversed(credited(row)):
            total = reward + gamma * total
            out.append(total)
        result.append(out[::-1])
    return table(rows, result)


def reinforce_plus_plus(rows: Sequence[Row], gamma: float = 0.9) -> Table:
    return whitened(reinforce(rows, gamma), rows, alone=True)


def remax(rows: Sequence[Row]) -> Table:
    returns = reinforce(rows, 1.0)
    shown = [[returns[i][t] - r.baseline for t in live(r)] for i, r in enumerate(rows)]
    return table(rows, shown)


def token_baseline(rows: Sequence[Row], *, by_rank: bool, zero_tail: bool = True) -> Table:
    returns = reinforce(rows, 1.0)

    def place(row: Row, t: int) -> int:
        return live(row).index(t) if by_rank else t - live(row)[0]

    def weight(row: Row, t: int) -> float:
        rho = row.is_weights or (1.0,) * len(row.mask)
        return sum(
            max(1.0 - 2.0 * math.exp(row.old_logp[s]) + row.sum_pi_squared[s], 0.0) * rho[s] ** 2
            for s in live(row)
            if s <= t
        )

    result: list[list[float]] = []
    for i, row in enumerate(rows):
        peers = [j for j, r in enumerate(rows) if r.group == row.group and live(r)]
        ends = [place(rows[j], live(rows[j])[-1]) for j in peers if j != i]
        out: list[float] = []
        for t in live(row):
            here = [(j, s) for j in peers for s in live(rows[j])]
            here = [(j, s) for j, s in here if place(rows[j], s) == place(row, t)]
            over = sum(returns[j][s] * weight(rows[j], s) for j, s in here)
            baseline = over / (sum(weight(rows[j], s) for j, s in here) + 1e-8)
            if zero_tail and ends and place(row, t) > max(ends):
                baseline = 0.0
            out.append(returns[i][t] - baseline if ends else 0.0)
        result.append(out)
    return table(rows, result)


def online_dpo(rows: Sequence[Row], beta: float = 0.1) -> Table:
    """σ(-β(c - r))·β over the pairs of the step, up for the best of a group, down for its worst."""

    def ratio(row: Row) -> float:
        return sum(row.old_logp[t] - row.ref_logp[t] for t in live(row))

    pairs: list[tuple[int, int]] = []
    for group in {r.group for r in rows}:
        places = [i for i, r in enumerate(rows) if r.group == group and live(r)]
        best = max(places, key=lambda i: outcome(rows[i]), default=-1)
        worst = min(places, key=lambda i: outcome(rows[i]), default=-1)
        if places and outcome(rows[best]) > outcome(rows[worst]):
            pairs.append((best, worst))
    numbers = [0.0] * len(rows)
    for best, worst in pairs:
        gap = beta * (ratio(rows[best]) - ratio(rows[worst]))
        push = beta / (1.0 + math.exp(gap)) / len(pairs)
        numbers[best], numbers[worst] = push, -push
    return tiled(rows, numbers)


PLAIN: dict[str, Callable[[Sequence[Row]], Table]] = {
    "gae": gae,
    "grpo": grpo,
    "turn_grpo": turn_grpo,
    "grpo_passk": grpo_passk,
    "gdpo": gdpo,
    "rloo": rloo,
    "opo": opo,
    "gpg": gpg,
    "reinforce": reinforce,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "remax": remax,
    "online_dpo": online_dpo,
    "optimal_token_baseline": lambda rows: token_baseline(rows, by_rank=False),
    "tir_optimal_token_baseline": lambda rows: token_baseline(rows, by_rank=True),
}
"""Name to plain estimator, at the knobs of `KNOBS`."""

KNOBS: dict[str, dict[str, float]] = {
    "gae": {"gamma": 0.9, "lam": 0.8},
    "turn_grpo": {"gamma": 0.5},
    "reinforce": {"gamma": 0.9},
    "reinforce_plus_plus": {"gamma": 0.9},
}
"""Knobs under which the two are compared, where they differ from the defaults."""
