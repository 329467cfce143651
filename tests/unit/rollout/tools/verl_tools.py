"""Classes as verl's users write them, without verl."""

from typing import Any


class Judge:
    def __init__(self, config: dict[str, Any], tool_schema: Any) -> None:
        self.config, self.tool_schema = config, tool_schema
        self.name = tool_schema.function.name
        self.instances: dict[str, dict[str, Any]] = {}

    async def create(self, instance_id: str, ground_truth: str = "", **kwargs: Any) -> str:
        self.instances[instance_id] = {"truth": ground_truth, "kwargs": kwargs, "best": 0.0}
        return instance_id

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[Any, float, dict[str, Any]]:
        held = self.instances[instance_id]
        held["best"] = max(held["best"], float(parameters["answer"] == held["truth"]))
        text = f"{held['best']} {held['kwargs']} {kwargs} {self.config['rate']}"
        return text, held["best"] - 0.5, {"tries": 1, "note": "text"}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        return self.instances[instance_id]["best"]

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        del self.instances[instance_id]


class Response:
    text = "from an object"


class Plain:
    """Says its own schema, returns an object, and knows no reward."""

    def __init__(self, config: dict[str, Any], tool_schema: Any) -> None:
        assert tool_schema is None

    def get_openai_tool_schema(self) -> dict[str, Any]:
        return {"type": "function", "function": {"name": "plain", "parameters": {}}}

    async def create(self, instance_id: str | None = None) -> tuple[str, None]:
        return "mine", None

    async def execute(self, instance_id: str, parameters: dict[str, Any]) -> tuple[Any, None, None]:
        assert instance_id == "mine"
        return Response(), None, None

    async def release(self, instance_id: str) -> None:
        return None


class Lacking:
    pass
