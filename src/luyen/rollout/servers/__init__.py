"""Rollout engines in servers of their own: vLLM, SGLang and OpenAI-compatible endpoints."""
