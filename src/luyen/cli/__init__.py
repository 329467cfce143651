"""Layer 9: the commands. Heavy imports happen only inside the command that needs them."""
