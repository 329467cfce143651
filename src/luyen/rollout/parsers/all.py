"""Every format, gathered: importing this module registers them all."""

from luyen.rollout.parsers import deepseek, glm, gpt_oss, hermes, llama3, mistral, qwen3_coder
from luyen.rollout.parsers.protocol import tool_parsers

__all__ = ["tool_parsers"]

MODULES = (deepseek, glm, gpt_oss, hermes, llama3, mistral, qwen3_coder)
