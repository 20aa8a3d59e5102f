"""Stores that people run already, as tiers: blocks by key, shared by many processes."""
