"""What ``kvtier bench serve`` and ``kvtier bench copy`` run: part of the product, for a person's
own model and machine. What this repository holds itself to, against limits and peers, is measured
in ``benchmarks/``, which is not installed.

``serve.py`` is the place to start: it runs the experiments one after another and collects a
``ServeResult``, from which the table, the JSON object and the HTML report are made. ``copies.py``
measures a device's copies alone, and needs no torch where the device needs none.
"""
