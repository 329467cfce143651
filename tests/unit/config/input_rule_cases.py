"""Rules about rows, and about files of rewards and samplers."""

INPUT_CASES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "D01": (("data.train_files=[]",), ()),
    "D02": (("data.train_files=/nowhere/rows.parquet",), ("data.train_files=ROWS",)),
    "D03": (("data.val_files=arithmetic://sum",), ("data.val_files=arithmetic://sum?split=b",)),
    "D04": (
        ("data.sampler.class_path=PLUGIN",),
        ("data.sampler.class_path=PLUGIN", "data.sampler.class_name=MySampler"),
    ),
    "D05": (
        ("reward.custom_reward_function.path=PLUGIN", "reward.custom_reward_function.name=scor"),
        ("reward.custom_reward_function.path=PLUGIN", "reward.custom_reward_function.name=score"),
    ),
    "A11": (
        ("reward.custom_reward_function.path=OBJECT", "reward.custom_reward_function.name=score"),
        ("reward.custom_reward_function.path=PLUGIN", "reward.custom_reward_function.name=score"),
    ),
    "A12": (
        ("reward.custom_reward_function.path=OBJECT", "reward.reward_manager.name=prime"),
        ("reward.custom_reward_function.path=PLUGIN", "reward.reward_manager.name=prime"),
    ),
    "D06": (("reward.reward_manager.name=naiv",), ("reward.reward_manager.name=dapo",)),
    "D09": (
        ("data.truncation=left",),
        ("data.truncation=left", "data.filter_overlong_prompts=false"),
    ),
    "D18": (("data.train_weights=[1, 3]",), ("data.train_weights=[3]",)),
    "D19": (
        ("data.train_weights=[3]", "data.sampler.name=sequential"),
        ("data.train_weights=[3]",),
    ),
    "D10": (
        ("data.sampler.name=mixed",),
        ("data.sampler={name: mixed, kwargs: {weights: {arithmetic/sum: 1}}}",),
    ),
    "D11": (
        (
            "data.sampler.class_path=PLUGIN",
            "data.sampler.class_name=MySampler",
            "data.sampler.name=grouped",
        ),
        ("data.sampler.class_path=PLUGIN", "data.sampler.class_name=MySampler"),
    ),
    "D12": (("data.train_files=hf://org/rows",), ("data.train_files=arithmetic://product",)),
    "D13": (("data.prompt_template=Think",), ("data.prompt_template='Think {prompt}'",)),
}
