"""Rules of the reward stack: overrides that trigger each, and overrides close by that do not."""

L = "reward.overlong_buffer"
OWN = "reward.custom_reward_function.path=PLUGIN"

REWARD_CASES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "W01": (
        ("reward.components={right: {rule: exact, wieght: 2}}",),
        ("reward.components={right: {rule: exact, weight: 2}}",),
    ),
    "W02": (
        ("reward.components={right: {rule: exacct}}",),
        ("reward.components={right: {rule: exact}}",),
    ),
    "W03": (
        ("reward.components={shape: {rule: regex}}",),
        ("reward.components={shape: {rule: regex, kwargs: {pattern: x}}}",),
    ),
    "W04": (("reward.routes={mine: [exat]}",), ("reward.routes={mine: [exact]}",)),
    "W05": (
        ("reward.components={right: {rule: exact}}", "reward.routes={mine: [numeric]}"),
        ("reward.components={right: {rule: exact}}", "reward.routes={mine: [right]}"),
    ),
    "W06": (
        (OWN, "reward.components={right: {rule: exact}}"),
        (OWN,),
    ),
    "W07": (
        ("reward.custom_reward_function.name=score",),
        ("reward.custom_reward_function.name=score", OWN),
    ),
    "W08": (
        (f"{L}.enable=true", f"{L}.len=4"),
        (f"{L}.enable=true", f"{L}.len=4", "reward.reward_manager.name=dapo"),
    ),
    "W09": (
        (f"{L}.enable=true", f"{L}.len=513", "reward.reward_manager.name=dapo"),
        (f"{L}.enable=true", f"{L}.len=512", "reward.reward_manager.name=dapo"),
    ),
    "W10": (
        (f"{L}.penalty_factor=0.5",),
        (f"{L}.penalty_factor=0.5", f"{L}.enable=true", "reward.reward_manager.name=dapo"),
    ),
    "W11": (
        ("reward.reward_manager.name=batch",),
        ("reward.reward_manager.name=batch", OWN),
    ),
    "W12": (
        ("reward.components={right: {rule: math}}",),
        ("reward.components={right: {rule: gsm8k}}",),
    ),
}
