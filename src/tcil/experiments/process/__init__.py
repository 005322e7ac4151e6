"""This process: its terminal, signals, exit codes and progress."""
