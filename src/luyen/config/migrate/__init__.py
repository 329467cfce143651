"""Configurations of verl, TRL, LLaMA-Factory and Axolotl, as Luyen's."""
