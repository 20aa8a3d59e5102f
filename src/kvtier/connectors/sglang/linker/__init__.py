"""Linker between SGLang's device pools and kvtier's tiers, in place of HiCache."""
