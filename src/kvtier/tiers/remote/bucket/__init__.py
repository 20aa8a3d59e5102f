"""Blocks in buckets: S3 and compatible stores, Google Cloud Storage, Azure."""
