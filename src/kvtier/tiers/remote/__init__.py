"""Tiers over existing stores: blocks by key, shared by many processes."""
