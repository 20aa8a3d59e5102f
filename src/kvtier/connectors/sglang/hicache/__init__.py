"""Storage back end below SGLang's HiCache."""
