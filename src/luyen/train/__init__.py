"""Layer 7: the training loops. Start reading at `luyen.train.loop`."""
