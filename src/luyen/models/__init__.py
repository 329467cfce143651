"""Layer 4: Hugging Face models behind one attention function and one log-probability."""

from luyen.base.process_setup import prepare_process

prepare_process()
