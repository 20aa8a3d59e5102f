"""Inputs that are fuzzed, a module each; see ``tests.fuzz.runner``."""
