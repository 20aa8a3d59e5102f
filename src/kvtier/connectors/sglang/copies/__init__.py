"""Copies between SGLang's own device and host pools."""
