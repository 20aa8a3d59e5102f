"""File formats of a slab: superblock, journal, records, folder."""
