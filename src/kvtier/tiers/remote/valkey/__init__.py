"""Blocks in Valkey and Redis servers."""
