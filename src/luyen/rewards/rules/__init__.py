"""Rules: functions that score an answer without a model."""
