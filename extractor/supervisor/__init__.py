"""Runs and the processes that compute them: launching, messages, work queue. Imports neither torch nor SGLang."""
