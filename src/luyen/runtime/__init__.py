"""Layer 6: where roles run. In this process: `luyen.runtime.local`."""
