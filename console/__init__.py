"""The terminal side of tapdeck: the command line and the console. Holds no truth about a run."""
