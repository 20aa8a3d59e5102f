"""Engines that kvtier plugs into. Nothing else imports an engine."""
