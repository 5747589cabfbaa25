"""What a client can check of the model that it was sent, before it trains on it.

    detector = Detector()
    report = detector.inspect(received_by(module, images, labels, previous=last_state))
    if report.suspicious:
        print(report.reason)

A statistic is a class in `fedmjp.detect.statistics`; `STATISTICS.register(NAME)` adds one. Thresholds are calibrated on
rounds of honest servers (docs/detection.md). A model that passes was not shown to be honest.
"""

from fedmjp.detect.detector import Detector, Finding, Report
from fedmjp.detect.received import ImageNorms, Received, received_by
from fedmjp.detect.statistics import STATISTICS, Measurement, Statistic
from fedmjp.detect.thresholds import THRESHOLDS, calibrate

__all__ = [
    "STATISTICS",
    "THRESHOLDS",
    "Detector",
    "Finding",
    "ImageNorms",
    "Measurement",
    "Received",
    "Report",
    "Statistic",
    "calibrate",
    "received_by",
]
