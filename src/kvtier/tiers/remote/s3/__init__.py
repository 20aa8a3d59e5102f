"""Blocks in S3 buckets and compatible stores."""
