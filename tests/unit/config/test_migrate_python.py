"""What `luyen migrate` knows of a Python file without running it, and what it names instead."""

from pathlib import Path

import pytest

from luyen.config.migrate.migrate import migrate
from luyen.config.migrate.reader import MigrationRequest
from luyen.config.migrate.report import Entry, Migration
from tests.e2e.tiny import luyen

MODEL, OPTIM = "actor_rollout_ref.model", "actor_rollout_ref.actor.optim"


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RATE", raising=False)


def read(text: str) -> Migration:
    Path("train.py").write_text(f"from trl import *\n{text}\n")
    return migrate(MigrationRequest(text="train.py"))


def entry(migration: Migration, name: str) -> Entry:
    [found] = [one for one in migration.entries if one.source == name and not one.is_default]
    return found


VALUES = {
    "an entry of a table": 'C = {"a": {"lr": 3e-4}}\nx = C["a"]["lr"]',
    "an entry with a default": 'C = {"lr": 3e-4}\nx = C.get("lr", 1.0)',
    "a variable of the environment": 'x = float(os.environ.get("RATE", "3e-4"))',
    "a field of a class": "class C:\n    lr: float = 3e-4\nx = C.lr",
    "a field of an object": "@dataclass\nclass C:\n    lr: float = 1.0\nx = C(lr=3e-4).lr",
    "a field with a factory": "class C:\n    lr: float = field(default=3e-4)\nx = C().lr",
    "an option": 'p.add_argument("--lr", type=float, default=3e-4)\na = p.parse_args()\nx = a.lr',
    "known options": 'p.add_argument("--lr", default=3e-4)\na, _ = p.parse_known_args()\nx = a.lr',
    "options of a function": (
        'def options():\n    p.add_argument("--lr", default=3e-4)\n    return p.parse_args()\n'
        "a = options()\nx = a.lr"
    ),
    "an argument that is all options": (
        'p.add_argument("--lr", default=3e-4)\ndef main(a):\n    x = a.lr\nmain(p.parse_args())'
    ),
    "a choice": 'IS_LARGE = False\nx = 1.0 if IS_LARGE else 3e-4 if not IS_LARGE else "no"',
    "an annotation": "x: float = 3e-4",
    "several at once": "n, x = 4, 3e-4",
    "an entry of a list": "R = [1.0, 3e-4]\nx = R[-1]",
    "a function that returns": "def g(a, b=2):\n    return a * b\nx = g(1.5e-4)",
    "a function of a variable": 'def g(d):\n    return float(getenv("R", str(d)))\nx = g(d=3e-4)',
    "an object below": "def f(c: C):\n    return 0\nclass C:\n    lr: float = 3e-4\nx = C().lr",
}


@pytest.mark.parametrize("name", VALUES)
def test_plain_values_are_known(name: str):
    assert read(f"{VALUES[name]}\nSFTConfig(learning_rate=x)").keys[f"{OPTIM}.lr"] == 3e-4


CHANGED = {
    "an entry": 'C = {"lr": 3e-4}\nC["lr"] = f()\nx = C["lr"]',
    "a table": 'C = {"lr": 3e-4}\nC.update(f())\nx = C["lr"]',
    "a field": "class C:\n    lr = 3e-4\nc = C()\nc.lr = f()\nx = c.lr",
    "a name": "x = 3e-4\nx *= 2",
    "a name in a loop": "for x in (1e-4, 3e-4):\n    pass\nx = 3e-4",
    "two values": "x = 3e-4\nx = 1e-4",
    "a function of another": "def g(a):\n    return a\ndef h(a):\n    return g(a)\nx = h(3e-4)",
    "a function of itself": "def g(a):\n    return g(a)\nx = g(3e-4)",
    "a function without its argument": "def g(a):\n    return 3e-4\nx = g()",
    "a function of two lines": "def g(a):\n    a = f(a)\n    return a\nx = g(3e-4)",
    "an index that is not there": "R = [3e-4]\nx = R[1]",
    "an option without a default": 'p.add_argument("--lr")\na = p.parse_args()\nx = a.lr',
    "a variable without a default": 'x = float(os.environ["RATE"])',
    "no number": 'x = float("fast")',
}


@pytest.mark.parametrize("name", CHANGED)
def test_what_the_script_changes_is_open(name: str):
    found = read(f"{CHANGED[name]}\nSFTConfig(learning_rate=x)")
    lost = entry(found, "learning_rate")
    assert (lost.column, lost.outcome.is_open) == ("unavailable", True)
    assert lost.outcome.note.endswith("the file has TRL's default, 2e-05")


def test_an_argument_is_the_one_object_of_its_class():
    head = "class C:\n    lr: float = 1.0\ndef train(c: C):\n    SFTConfig(learning_rate=c.lr)\n"
    assert read(f"{head}train(C(lr=3e-4))").keys[f"{OPTIM}.lr"] == 3e-4
    twice = read(f"{head}train(C(lr=3e-4))\ntrain(C(lr=2e-4))")
    assert entry(twice, "learning_rate").outcome.is_open


def test_tables_that_grow_without_end_are_open():
    grown = "a = [1, 2]\n" + "".join(
        f"a{i + 1} = [{name}, {name}]\n" for i in range(60) for name in [f"a{i}" if i else "a"]
    )
    found = read(f"{grown}SFTConfig(learning_rate=a60[0])")
    assert entry(found, "learning_rate").outcome.is_open


def test_a_model_that_a_keyword_names_is_trained():
    found = read("""
SETTINGS = {"model": "org/model", "rank": 16}
model, tokenizer = FastLanguageModel.from_pretrained(
    model_name=SETTINGS["model"], max_seq_length=512, load_in_4bit=True, fast_inference=True,
    revision="v2",
)
model = FastLanguageModel.get_peft_model(
    model, r=SETTINGS["rank"], lora_alpha=16, use_gradient_checkpointing="unsloth", random_state=3,
)
args = SFTConfig(output_dir="out")
""")
    assert found.keys[f"{MODEL}.path"] == "org/model"
    assert found.keys[f"{MODEL}.lora_rank"] == 16
    assert found.keys[f"{MODEL}.enable_gradient_checkpointing"] is True
    lengths = [found.keys[f"data.max_{part}_length"] for part in ("prompt", "response")]
    assert sum(lengths) == 512
    assert entry(found, "model_revision").column == "unavailable"
    assert entry(found, "fast_inference").column == "implied"
    assert entry(found, "random_state").column == "implied"


def test_a_length_of_the_trainer_wins_over_that_of_the_loader():
    loaded = "FastLanguageModel.from_pretrained('org/model', max_seq_length=512)\n"
    found = read(f"{loaded}SFTConfig(max_length=256)")
    assert found.keys["data.max_prompt_length"] + found.keys["data.max_response_length"] == 256


def test_paths_tables_of_arguments_and_loaded_adapters_are_read():
    found = read("""
p.add_argument("--sft-checkpoint", default="out/sft")
a = p.parse_args()
out = Path("out") / "dpo"
bnb = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_use_double_quant=True,
    bnb_4bit_compute_dtype=torch.bfloat16)
model = AutoPeftModelForCausalLM.from_pretrained(a.sft_checkpoint, quantization_config=bnb)
words = {"model": model, "ref_model": None, "train_dataset": rows, "eval_dataset": held_out,
    "args": DPOConfig(output_dir=str(out))}
words["processing_class"] = tokenizer
trainer = DPOTrainer(**words)
""")
    assert found.keys["trainer.default_local_dir"] == "out/dpo"
    assert (entry(found, "adapter").value, entry(found, "adapter").column) == (
        "out/sft",
        "unavailable",
    )
    assert "data.val_files" in entry(found, "eval_dataset").outcome.note
    assert entry(found, "bnb_4bit_compute_dtype").column == "implied"
    assert entry(found, "bnb_4bit_use_double_quant").column == "implied"
    assert not any(one.outcome.is_open for one in found.entries if one.source != "model")


def test_changes_of_rows_and_objects_of_the_trainer_are_named():
    found = read("""
rows = load_dataset("org/rows", split="train").map(render).shuffle(seed=1)
parts = rows.train_test_split(test_size=0.1)
trainer = GRPOTrainer("org/model", reward_funcs=f, tools=[search], callbacks=None,
    args=GRPOConfig(), train_dataset=parts["train"], eval_dataset=parts["test"])
""")
    for name in ("dataset.map", "dataset.train_test_split", "tools", "eval_dataset"):
        assert entry(found, name).column == "unavailable", name
    assert "render" in entry(found, "dataset.map").value
    assert "data.val_files" in entry(found, "dataset.train_test_split").outcome.note
    assert entry(found, "dataset.shuffle").column == "implied"
    assert "callbacks" not in {one.source for one in found.entries}


def test_arguments_of_transformers_and_of_the_trainer_are_read_where_there_is_no_other():
    migration = read(
        'A = {"learning_rate": 3e-4, "output_dir": os.path.join("out", "a")}\n'
        "trainer = SFTTrainer(model=m, max_seq_length=64, packing=True, "
        'dataset_text_field="text", args=TrainingArguments(weight_decay=0.5, **A))'
    )
    assert migration.keys["trainer.stage"] == "sft"
    assert migration.keys[f"{OPTIM}.lr"] == 3e-4
    assert migration.keys[f"{OPTIM}.weight_decay"] == 0.5
    assert migration.keys["trainer.default_local_dir"] == "out/a"
    assert migration.keys["data.max_prompt_length"] == 32
    assert entry(migration, "packing").column == "unavailable"


def test_an_adapter_that_the_script_loads_is_named():
    load = 'm = PeftModel.from_pretrained(m, "out/sft")\nDPOConfig(beta=0.1)'
    alone = entry(read(load), "adapter")
    assert (alone.value, alone.column) == ("out/sft", "unavailable")
    with_rank = read(f"{load}\nLoraConfig(r=4)")
    assert with_rank.keys[f"{MODEL}.lora_adapter_path"] == "out/sft"
    merged = entry(read(f"{load}\nm = m.merge_and_unload()"), "merged_adapter")
    assert (merged.value, merged.column) == ("out/sft", "unavailable")


def test_what_is_to_be_written_by_hand_is_said_at_the_end():
    Path("train.py").write_text("from trl import *\nSFTConfig(learning_rate=rate())\n")
    done = luyen("migrate", "train.py", "--output", "new.yaml")
    assert done.exit_code == 0, done.output
    last = done.stdout.partition("To write by hand\n")[2].splitlines()
    assert last[0].startswith("  learning_rate: the script computes it")
    assert last[1].startswith(f"  model: no model is named: set {MODEL}.path")
