"""The paper: its numbers, experiments, tables, figures and claims."""
