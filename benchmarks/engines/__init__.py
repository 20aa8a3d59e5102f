"""Servers of other engines, and the measurements that all of them share."""
