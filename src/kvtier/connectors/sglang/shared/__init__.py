"""Parts that the storage back end and the linker use."""
