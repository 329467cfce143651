"""The configuration's shape: six blocks, every key typed, documented and defaulted."""
