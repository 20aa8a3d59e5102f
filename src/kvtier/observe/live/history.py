"""History of a server: readings of the last minute, values of its charts of the last hour."""

from __future__ import annotations

from collections import deque
from typing import Any

from kvtier.observe.live.charts import ChartHour, chart_values
from kvtier.observe.live.dialects import dialect_of
from kvtier.observe.live.differences import grown
from kvtier.observe.live.make import make_picture
from kvtier.observe.live.picture import Picture
from kvtier.observe.live.questions import minute
from kvtier.observe.live.reading import Reading

WINDOW_S = 60.0
"""Window of rates that are shown as "in the last minute", and length of the busy minute."""
FLOW_S = 5.0
"""Window of rates that are shown as "now"; in a shorter one they would fluctuate."""
MAX_AGE_S = 90.0
"""Age beyond which a reading is not used for the last minute, even if there is no younger one."""
MOST = 256
"""Most readings that are kept."""


class History:
    """Readings, oldest first. A counter that decreases means a restart; older ones are dropped."""

    def __init__(self) -> None:
        self._readings: deque[Reading] = deque(maxlen=MOST)
        self._busy: tuple[Reading, Reading] | None = None
        self._hour = ChartHour()
        self._since_s: float | None = None
        self._has_restarted = False

    def add(self, reading: Reading) -> None:
        """Add a reading that is newer than all before.

        The oldest reading kept is about a minute old. It is dropped if it is older than
        ``MAX_AGE_S``, so that rates start anew after a pause without readings.
        """
        if self._readings and reading.has_fallen(self._readings[-1]):
            self._readings.clear()
            self._busy = None
            self._since_s, self._has_restarted = reading.at_s, True
        if self._since_s is None:
            self._since_s = reading.at_s
        before, dialect = self._readings[-1] if self._readings else reading, dialect_of(reading)
        self._readings.append(reading)
        while len(self._readings) > 2 and reading.at_s - self._readings[1].at_s >= WINDOW_S:
            self._readings.popleft()
        if reading.at_s - self._readings[0].at_s > MAX_AGE_S:
            self._readings.popleft()
        if dialect and any(grown(before, reading, name) for name in dialect.activity):
            first = self._readings[0]
            self._busy = (first, reading) if first is not reading else None

    @property
    def age_s(self) -> float:
        """Seconds from the first reading since the server's start to the last."""
        if not self._readings or self._since_s is None:
            return 0.0
        return self._readings[-1].at_s - self._since_s

    def picture(self) -> Picture:
        """Return the picture at the last reading. There must be one."""
        now = self._readings[-1]
        recent = (reading for reading in self._readings if now.at_s - reading.at_s <= FLOW_S)
        before = next(recent)
        if before is now and len(self._readings) > 1:
            before = self._readings[-2]
        return make_picture(
            self._readings[0], before, now, self.age_s, self._has_restarted, self._busy
        )

    def look(self, reading: Reading) -> dict[str, Any]:
        """Add a reading. Return the picture as plain data, with the values of its charts.

        ``minute`` in it is the name of the busy minute, see ``questions.minute``.
        """
        self.add(reading)
        picture = self.picture()
        charts = self._hour.add(reading.at_s, chart_values(picture))
        return {**picture.as_json(), "minute": minute(picture), "charts": charts}

    def hour(self, now_s: float) -> dict[str, Any]:
        """Return the last hour of the charts as plain data; see ``ChartHour``."""
        return self._hour.as_json(now_s)
