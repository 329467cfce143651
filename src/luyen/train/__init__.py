"""Layer 7: the loops. Start reading at `luyen.train.online`."""
