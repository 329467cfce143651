"""What is wrong with a run, judged by the files it leaves."""
