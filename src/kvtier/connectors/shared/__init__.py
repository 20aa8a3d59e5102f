"""What connectors have in common: parts that translate for an engine, whichever it is."""
