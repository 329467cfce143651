"""Rules: functions that judge an answer without a model."""
