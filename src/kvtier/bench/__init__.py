"""Experiments that a person can run: what the cache saves, what it costs, whether it is right.

``serve.py`` is the place to start: it runs the experiments one after another and collects a
``ServeResult``, from which the table, the JSON object and the HTML report are made. ``copies.py``
measures a device's copies alone, and needs no torch where the device needs none.
"""
