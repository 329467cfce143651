"""Layer 6: where roles run: in this process (`luyen.runtime.in_process`) or on Ray."""
