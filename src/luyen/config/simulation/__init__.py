"""Time, communication and memory of a step on hardware that need not be here: `luyen plan`."""
