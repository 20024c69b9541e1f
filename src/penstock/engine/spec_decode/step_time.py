"""Estimated duration of a decode step, learned from measured steps."""

from __future__ import annotations

import math

MAX_SAMPLES = 16
"""Number of steps as which the mean duration of a number of rows counts at most."""
HALF_LIFE = 4096
"""Number of recorded steps after which a mean duration counts half as much."""
SPEED_STEPS = 16
"""Number of steps over which the machine's current speed is averaged."""
STEPS_PER_FIT = 16
EXACT_ROWS = 64
"""Up to this number of rows, each has its own mean; above it, there are eight means per power of two."""
OUTLIER = 2.0
"""Durations above this multiple of the estimate count as this multiple: other processes may have delayed the step."""
DEVIATION_SAMPLES = 4
"""Number of steps for which half of a mean's deviation from the line is believed."""


class StepTime:
    """Duration of a step as a function of its rows: a line, and the deviations of the measured numbers of rows from it,
    since kernels compute rows in tiles.

    Durations are divided by the current speed of the machine, an average over a few steps, before their means are
    taken: other processes and longer contexts change all durations, and must not look like an effect of the rows. The
    line minimizes the sum of the squared relative errors of the means. Since means remain while other numbers of rows
    are computed, the slope stays known when all steps have the same size.

    Args:
        ratio: initial ratio of the slope to the duration at 0 rows.
    """

    def __init__(self, ratio: float) -> None:
        self._ratio = ratio
        self._intercept, self._slope = 1.0, ratio
        self._speed = 0.0
        self.steps = 0
        """Number of recorded steps."""
        self._means: dict[int, _Mean] = {}

    @property
    def slope(self) -> float:
        """Seconds per row."""
        return self._slope * self._speed

    def seconds(self, rows: int) -> float:
        """Estimated duration of a step, at the current speed; in an arbitrary unit before the first recorded step."""
        return self._normalized(rows) * (self._speed or 1.0)

    def record(self, rows: int, seconds: float) -> None:
        """Record the duration of a step of ``rows`` tokens."""
        self.steps += 1
        ratio = seconds / self._normalized(rows)
        if self._speed:
            ratio = min(ratio, OUTLIER * self._speed)
            self._speed += (ratio - self._speed) / min(self.steps, SPEED_STEPS)
        else:
            self._speed = ratio
        duration = ratio * self._normalized(rows) / self._speed
        key = _key(rows)
        if mean := self._means.get(key):
            mean.add(rows, duration, self.steps)
        else:
            self._means[key] = _Mean(rows, duration, self.steps)
        if self.steps % STEPS_PER_FIT == 0:
            self._fit()

    def _normalized(self, rows: int) -> float:
        line = self._intercept + self._slope * rows
        if mean := self._means.get(_key(rows)):
            line += mean.deviation * mean.samples / (mean.samples + DEVIATION_SAMPLES)
        return line

    def _fit(self) -> None:
        """Weighted least squares, with one more observation: the initial ratio, at a distance of eight rows."""
        sum_1 = sum_x = sum_xx = sum_y = sum_xy = 0.0
        for mean in self._means.values():
            weight = mean.samples * 2.0 ** ((mean.last - self.steps) / HALF_LIFE) / mean.seconds**2
            sum_1 += weight
            sum_x += weight * mean.rows
            sum_xx += weight * mean.rows**2
            sum_y += weight * mean.seconds
            sum_xy += weight * mean.rows * mean.seconds
        rows, seconds = sum_x / sum_1, sum_y / sum_1
        expected = self._ratio * seconds / (1 + self._ratio * rows)  # slope of the line with the initial ratio
        prior = (8 / seconds) ** 2
        variance, covariance = sum_xx - sum_1 * rows**2, sum_xy - sum_1 * rows * seconds
        slope = (covariance + prior * expected) / (variance + prior)
        self._slope = min(max(slope, 0.02 * expected), seconds / rows)
        self._intercept = seconds - self._slope * rows
        for mean in self._means.values():
            mean.deviation = mean.seconds - self._intercept - self._slope * mean.rows


def _key(rows: int) -> int:
    return rows if rows <= EXACT_ROWS else EXACT_ROWS + int(8 * math.log2(rows / EXACT_ROWS))


class _Mean:
    """Mean duration of steps with similar numbers of rows, at the same speed of the machine."""

    def __init__(self, rows: int, seconds: float, step: int) -> None:
        self.rows, self.seconds, self.samples, self.last = float(rows), seconds, 1, step
        self.deviation = 0.0
        """Difference to the line."""

    def add(self, rows: int, seconds: float, step: int) -> None:
        self.samples = min(self.samples + 1, MAX_SAMPLES)
        self.rows += (rows - self.rows) / self.samples
        self.seconds += (seconds - self.seconds) / self.samples
        self.last = step
