"""Chat templates are programs of strangers: they are rendered in a process that has limits."""
