"""Layer 5: training. Packed batches in; gradients, optimizer steps and scores out."""
