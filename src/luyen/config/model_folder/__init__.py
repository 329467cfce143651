"""What can be said of a model folder from its files alone, without torch: `check` and `train`."""
