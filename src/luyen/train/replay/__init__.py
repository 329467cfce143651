"""A recorded step done again from the files of its run, as it was or with another knob."""
