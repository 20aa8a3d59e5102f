"""Blocks in buckets of S3 and stores that speak its API."""
