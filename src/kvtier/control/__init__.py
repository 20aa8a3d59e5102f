"""HTTP layer of a running cache's control, for ``kvtier node`` and ``kvtier serve``.

``contract.py``  what is asked and answered
``routes.py``    routes of the changes and look-ups
``page.py``      routes of the live page
``client.py``    a client of both
"""
