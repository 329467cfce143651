"""Distillation: divergences between a student and a teacher, one number per token."""
