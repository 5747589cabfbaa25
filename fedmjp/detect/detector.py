"""All statistics together: what a client finds in a received model, and whether it should train on it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from attacks.registry import UsageError
from fedmjp.detect.received import Received
from fedmjp.detect.statistics import STATISTICS, Measurement, unread_weights
from fedmjp.detect.thresholds import THRESHOLDS


@dataclass(frozen=True)
class Finding:
    """One statistic of a received model.

    Attributes:
        statistic: its name.
        value: None for no statement.
        threshold: above it the statistic alarms.
        about: where it was found, or why there is no statement.
        warning: what the client should know beside it, in words; "" for nothing.
    """

    statistic: str
    value: float | None
    threshold: float
    about: str
    warning: str = ""

    @property
    def alarms(self) -> bool:
        """Whether the value lies above the threshold; NaN does."""
        return self.value is not None and not self.value <= self.threshold

    def __str__(self) -> str:
        if self.value is None:
            return f"{self.statistic}: no statement ({self.about})"
        return f"{self.statistic} {self.value:.3g}, threshold {self.threshold:.3g} ({self.about})"


@dataclass(frozen=True)
class Report:
    """What a client found.

    Attributes:
        findings: one for each statistic, in the order of the detector.
        unread: names of parameters of two or more dimensions whose values no statistic of `STATISTICS` reads, as tables
            of positions: a change of them shows in the gradients of the client's batch at most.
    """

    findings: tuple[Finding, ...]
    unread: tuple[str, ...] = ()

    @property
    def suspicious(self) -> bool:
        """Whether a statistic alarms."""
        return any(finding.alarms for finding in self.findings)

    @property
    def score(self) -> float:
        """Largest value in units of its threshold; above 1 a statistic alarms.

        Infinity if a value is NaN, which alarms; NaN without any statement.
        """
        stated = [f.value / f.threshold for f in self.findings if f.value is not None]
        return math.inf if any(map(math.isnan, stated)) else max(stated, default=math.nan)

    @property
    def reason(self) -> str:
        """The alarms in one line, "" for none."""
        return "; ".join(str(finding) for finding in self.findings if finding.alarms)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the client should know although it is no alarm."""
        return tuple(finding.warning for finding in self.findings if finding.warning)

    @property
    def not_stated(self) -> dict[str, str]:
        """By statistic that makes no statement, why."""
        return {f.statistic: f.about for f in self.findings if f.value is None}


@dataclass(frozen=True)
class Detector:
    """Checks a received model.

    Args:
        thresholds: by statistic; those that are not named are not computed.

    Raises:
        UsageError: no such statistic, or a threshold that is not positive.
    """

    thresholds: Mapping[str, float] = field(default_factory=lambda: dict(THRESHOLDS))

    def __post_init__(self) -> None:
        """Check names and thresholds."""
        for name, threshold in self.thresholds.items():
            STATISTICS.check(name)
            if not threshold > 0:
                raise UsageError(f"the threshold of {name} must be positive, not {threshold}")

    def inspect(self, received: Received) -> Report:
        """Compute every statistic of a received model.

        A statistic that cannot be computed here makes no statement, and says why.
        """
        found = {name: _measured(name, received) for name in self.thresholds}
        findings = (Finding(n, m.value, self.thresholds[n], m.about, m.warning) for n, m in found.items())
        return Report(tuple(findings), unread_weights(received.module))


def _measured(name: str, received: Received) -> Measurement:
    try:
        return STATISTICS.get(name)().measure(received)
    except UsageError as error:
        return Measurement(None, str(error))
