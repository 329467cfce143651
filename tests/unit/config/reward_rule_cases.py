"""Rules of the reward stack: overrides that trigger each, and overrides close by that do not."""

L = "reward.overlong_buffer"
TWO = "reward.components={a: {rule: json}, b: {rule: exact"
GATE = "gate: {by:"
POLICY = "{judge: {base_url: 'engine://', prompt: '{answer}'}}"
OWN = "reward.custom_reward_function.path=PLUGIN"
CODE = "reward.components={right: {rule: code}}"
OF_ROWS = "data.train_files=ROWS"
TURNS = "actor_rollout_ref.rollout.multi_turn"
PYTHON = (f"{TURNS}.enable=true", f"{TURNS}.tool_config_path=PROGRAMS")

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
    "W13": (
        ("reward.cache.enable=true", f"reward.components={{a: {POLICY}}}"),
        ("reward.cache.enable=true", f"reward.components={{a: {POLICY}, b: {{rule: exact}}}}"),
    ),
    "Z01": (
        (CODE, OF_ROWS, "sandbox.require=[files]", "BARE"),
        (CODE, OF_ROWS, "sandbox.require=[network]", "BARE"),
    ),
    "Z02": ((*PYTHON, "BARE"), PYTHON),
    "Z03": ((CODE, OF_ROWS), (CODE, OF_ROWS, "sandbox.require=[verdicts]")),
    "Z04": (("sandbox.require=[files]",), (*PYTHON, "sandbox.require=[files]")),
    "W14": (
        ("reward.components={form: {rule: regex, kwargs: {pattern: '(a'}}}",),
        ("reward.components={form: {rule: regex, kwargs: {pattern: '(a)'}}}",),
    ),
    "W16": (
        ("reward.components={a: {rule: numeric, kwargs: {tolerance: much}}}",),
        ("reward.components={a: {rule: numeric, kwargs: {tolerance: 0.1}}}",),
    ),
    "W17": (
        ("reward.components={a: {rule: length, kwargs: {free: 512}}}",),
        ("reward.components={a: {rule: length, kwargs: {free: 511}}}",),
    ),
    "W18": (
        ("reward.components={a: {rule: ifeval}}",),
        ("reward.components={a: {rule: ifeval}}", "data.train_files=ROWS"),
    ),
    "W19": (
        (
            "reward.components={a: {judge: {base_url: 'engine://', prompt: '{answer}'}}}",
            "data.max_response_length=6",
            "data.max_prompt_length=40",
        ),
        ("reward.components={a: {judge: {base_url: 'engine://', prompt: '{answer}'}}}",),
    ),
    "W15": (
        (
            "reward.components={a: {judge: {base_url: 'http://h/v1', prompt: '{answer}', "
            "api_key_env: NO_SUCH_KEY}}}",
        ),
        (
            "reward.components={a: {judge: {base_url: 'http://h/v1', prompt: '{answer}', "
            "api_key_env: PATH}}}",
        ),
    ),
    "V01": (
        ("reward.components={a: {rule: exact}, b: {rule: json, gate: {by: right}}}",),
        ("reward.components={a: {rule: exact}, b: {rule: json, gate: {by: a}}}",),
    ),
    "V02": (
        (f"reward.components={{a: {{rule: exact, {GATE} b}}}}, b: {{rule: json, {GATE} a}}}}}}",),
        (f"reward.components={{a: {{rule: exact}}, b: {{rule: json, {GATE} a}}}}}}",),
    ),
    "V03": (
        (f"{TWO}, bar: 0.5}}}}",),
        (f"{TWO}, bar: 0.5}}}}", "reward.combine=lexicographic"),
    ),
    "V04": (
        ("reward.components={taste: {model: reward_model}}",),
        ("reward.components={taste: {model: reward_model}}", "reward.reward_model.enable=true"),
    ),
    "V05": (
        ("reward.components={a: {rule: exact}}", "reward.combine=min"),
        (f"{TWO}}}}}", "reward.combine=min"),
    ),
    "V06": (
        (f"{TWO}}}}}", "reward.combine=gdpo", "actor_rollout_ref.rollout.n=1"),
        (f"{TWO}}}}}", "reward.combine=gdpo", "actor_rollout_ref.rollout.n=4"),
    ),
    "V07": (
        (f"{TWO}, normalise: running}}}}", "reward.combine=gdpo"),
        (f"{TWO}, normalise: running}}}}",),
    ),
}
