"""Experiments of ``kvtier bench serve`` and ``kvtier bench copy``.

They are part of the product, for a user's own model and machine. What this repository measures
against limits and peers is in ``benchmarks/``, which is not installed.

``serve.py`` is the place to start: it runs the experiments one after another and collects a
``ServeResult``, from which the table, the JSON object and the HTML report are made. ``copies.py``
measures a device's copies alone, and needs no torch where the device needs none.
"""
