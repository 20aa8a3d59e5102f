"""HTTP layer of a running cache's control, for ``kvtier node`` and ``kvtier serve``.

``contract.py``  bodies of requests and answers
``routes.py``    routes of the changes and look-ups
``page.py``      routes of the live page
``connection.py``  one HTTP connection, and ``doorman.py``  the limits on all of them
"""
