"""An OpenAI-compatible HTTP server over the embedded rollout engine."""
