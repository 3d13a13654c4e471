"""Run, profile and explain GPU performance problems; every number is evidence from a recorded run."""

__version__ = "0.1.0"
