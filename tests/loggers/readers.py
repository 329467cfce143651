"""What each logger's own reader finds: step -> metric -> value, and tables of rollouts.

wandb's package reads files of offline runs in its Go binary alone; here its protobuf messages are
parsed by its own classes, and the records around them (LevelDB's log format) by hand.
"""

import json
import math
import re
import struct
from collections import defaultdict
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias

Values: TypeAlias = dict[int, dict[str, float]]
Tables: TypeAlias = dict[tuple[str, int], Any]
"""(name of the table, step) -> what the reader gives for it."""
_BLOCK, _HEAD, _PREAMBLE = 32768, 7, 7


def read_tensorboard(folder: Path) -> tuple[Values, Tables]:
    """By TensorBoard's event accumulator; its texts are Markdown."""
    module: Any = import_module("tensorboard.backend.event_processing.event_accumulator")
    found = module.EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    found.Reload()
    values: Values = defaultdict(dict)
    tables: Tables = {}
    for tag in found.Tags()["tensors"]:  # TensorBoard makes tensors of scalars, too
        plugin = found.SummaryMetadata(tag).plugin_data.plugin_name
        for event in found.Tensors(tag):
            if plugin == "text":
                tables[tag, event.step] = event.tensor_proto.string_val[0].decode()
            else:
                values[event.step][tag] = event.tensor_proto.float_val[0]
    for tag in found.Tags()["scalars"]:
        for event in found.Scalars(tag):
            values[event.step][tag] = event.value
    return dict(values), tables


def read_wandb(folder: Path) -> tuple[Values, Tables]:
    """Of every offline session in the run directory, in order; later ones win."""
    messages: Any = import_module("wandb.proto.wandb_internal_pb2")
    values: Values = defaultdict(dict)
    tables: Tables = {}
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        for payload in _records(file.read_bytes()):
            record = messages.Record.FromString(payload)
            if record.WhichOneof("record_type") != "history":
                continue
            step, media = record.history.step.num, defaultdict[str, dict[str, Any]](dict)
            for item in record.history.item:
                name, *inner = item.nested_key or (item.key,)
                value = json.loads(item.value_json)
                if inner:  # what a table is made of, piece by piece
                    media[name][inner[0]] = value
                elif not name.startswith("_"):
                    values[step][name] = float(value)
            for name, facts in media.items():
                content = (file.parent / "files" / facts["path"]).read_text()
                tables[name, step] = json.loads(content)
    return dict(values), tables


def _records(data: bytes) -> Iterator[bytes]:
    """Payloads of a LevelDB log, with wandb's seven bytes before the first block's records."""
    assert data[:4] == b":W&B"
    at, parts = _PREAMBLE, b""
    while at + _HEAD <= len(data):
        if _BLOCK - at % _BLOCK < _HEAD:
            at += _BLOCK - at % _BLOCK
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + _HEAD])
        parts += data[at + _HEAD : at + _HEAD + size]
        at += _HEAD + size
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


def read_mlflow(store: str, run_id: str) -> tuple[Values, Tables]:
    """By MLflow's client and `load_table`."""
    mlflow: Any = import_module("mlflow")
    mlflow.set_tracking_uri(store)  # `load_table` asks it, too
    client = mlflow.MlflowClient()
    [experiment] = client.search_experiments(filter_string="name = 'luyen'")
    [run] = client.search_runs([experiment.experiment_id], f"tags.`luyen.run_id` = '{run_id}'")
    assert run.info.status == "FINISHED"
    values: Values = defaultdict(dict)
    for name in run.data.metrics:
        for metric in client.get_metric_history(run.info.run_id, name):
            values[metric.step][name] = metric.value
    tables: Tables = {}
    for split in ("train", "validation"):
        for file in client.list_artifacts(run.info.run_id, f"rollouts/{split}"):
            step = int(re.findall(r"step_(\d+)", file.path)[0])
            frame = client.load_table(experiment.experiment_id, file.path, [run.info.run_id])
            tables[f"rollouts/{split}", step] = frame.to_dict("records")
    return dict(values), tables


def read_trackio(name: str) -> tuple[Values, Tables]:
    """By trackio's storage."""
    storage: Any = import_module("trackio.sqlite_storage").SQLiteStorage
    values: Values = defaultdict(dict)
    tables: Tables = {}
    for line in storage.get_logs("luyen", name):
        for key, value in line.items():
            if isinstance(value, dict) and value.get("_type") == "trackio.table":
                tables[key, line["step"]] = value["_value"]
            elif key not in ("step", "timestamp"):
                values[line["step"]][key] = float(value)
    return dict(values), tables


def close_to(found: Values, wanted: Values, *, single: bool = False) -> list[str]:
    """Metrics that are missing or other than wanted; `single`: floats of 32 bits."""
    wrong: list[str] = []
    for step, metrics in wanted.items():
        for name, value in metrics.items():
            there = found.get(step, {}).get(name)
            near = 1e-6 if single else 0.0
            if there is None or not (
                math.isclose(there, value, rel_tol=near) or (there != there and value != value)
            ):
                wrong.append(f"step {step} {name}: {there} for {value}")
    return wrong
