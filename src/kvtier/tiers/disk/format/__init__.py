"""Files of a slab: superblock, journal, records, folder."""
