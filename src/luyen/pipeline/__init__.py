"""Layer 8: pipelines of training stages, checkpoints for inference, and export."""
