"""Reading slabs without owning them: reports, verification, scrubbing."""
