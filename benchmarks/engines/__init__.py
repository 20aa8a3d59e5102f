"""Servers of other engines, and measurements that are the same under each."""
