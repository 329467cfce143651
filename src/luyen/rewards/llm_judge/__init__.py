"""LLM-as-judge: prompt, endpoint, and the score in the reply."""
