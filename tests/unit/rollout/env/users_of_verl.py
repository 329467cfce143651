"""Users as verl's interactions are written, without their base class."""


class GuessInteraction:
    """Gives hints until the number is right; remembers what it was called with."""

    def __init__(self, config):
        self.config = config
        self.open = {}
        self.finished = []
        self.heard = []

    async def start_interaction(self, instance_id=None, ground_truth=None, **kwargs):
        self.open[instance_id] = ground_truth
        return instance_id

    async def generate_response(self, instance_id, messages, **kwargs):
        self.heard.append((instance_id, messages, kwargs))
        if messages[-1]["content"] == self.open[instance_id]:
            return True, "Right!", await self.calculate_score(instance_id), {}
        return False, self.config["hint"], 0.0, {}

    async def calculate_score(self, instance_id, **kwargs):
        return self.config.get("worth", 1.0)

    async def finalize_interaction(self, instance_id, **kwargs):
        del self.open[instance_id]
        self.finished.append(instance_id)


class Slow(GuessInteraction):
    """Methods that are no coroutines: they run on threads."""

    def generate_response(self, instance_id, messages, **kwargs):
        return True, "", 0.25, {}


class Odd:
    """Gives what its configuration says."""

    def __init__(self, config):
        self.gives = config["gives"]

    async def start_interaction(self, instance_id, **kwargs):
        if self.gives == "no start":
            raise RuntimeError("nobody is here")

    async def generate_response(self, instance_id, messages, **kwargs):
        return self.gives if isinstance(self.gives, str) else tuple(self.gives)


class Half:
    def __init__(self, config):
        pass

    async def start_interaction(self, instance_id):
        return instance_id


class Needy(Odd):
    def __init__(self, config):
        raise KeyError("model")
