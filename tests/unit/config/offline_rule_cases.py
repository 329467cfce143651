"""Rules of offline stages: overrides that trigger each, and overrides close by that do not."""

PAIRS = "trainer.stage=preference"
SFT = "trainer.stage=sft"

OFFLINE_CASES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "Y01": (
        (PAIRS, "preference.loss_type=[sigmoid,kto]"),
        (PAIRS, "preference.loss_type=[sigmoid,sft]"),
    ),
    "Y02": (
        (PAIRS, "preference.loss_type=[sigmoid,sft]", "preference.loss_weights=[1.0]"),
        (PAIRS, "preference.loss_type=[sigmoid,sft]", "preference.loss_weights=[1.0,0.5]"),
    ),
    "Y03": (
        (PAIRS, "preference.loss_type=ipo", "preference.simpo_gamma=1.0"),
        (PAIRS, "preference.loss_type=simpo", "preference.simpo_gamma=1.0"),
    ),
    "Y11": (
        (PAIRS, "preference.loss_type=[sigmoid,aot]", "preference.f_divergence_type=js_divergence"),
        (PAIRS, "preference.loss_type=[sigmoid,sft]", "preference.f_divergence_type=js_divergence"),
    ),
    "Y04": (
        (PAIRS, "preference.loss_type=orpo", "preference.reference=precomputed"),
        (PAIRS, "preference.loss_type=ipo", "preference.reference=precomputed"),
    ),
    "Y05": ((SFT, "preference.beta=0.5"), (PAIRS, "preference.beta=0.5")),
    "Y07": ((SFT, "data.prompt_key=question"), ("data.prompt_key=question",)),
    "Y06": ((SFT, "sft.loss=dfft"), (SFT, "sft.loss=dft")),
}
