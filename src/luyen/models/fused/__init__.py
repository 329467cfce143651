"""Parts of a decoder layer in few kernels, the same for training and for sampling."""
